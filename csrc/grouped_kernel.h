// The last product of most plans, one for each group (the gates, as a rule), written where it belongs, with the bias:
//
//   y[r, g, j] = bias[g, j] + sum over k of a[g, r, k] w[g, k, j]
//
// and its gradients. k is short. As a batch of matrices with strides, BLAS takes several times as long. Needs matrices_kernel.h.

constexpr long PART_ROWS = 48;    // rows that stay in cache for both gradients
constexpr long SHORT_DEPTH = 32;  // up to here w is read where it lies; longer sums are packed

// Numbers of memory for one group.
long grouped_memory(long depth, long columns) {
    return depth <= SHORT_DEPTH ? PANEL * depth : matrix_memory(depth, columns);
}

// One group: y (rows, columns) from a (rows, depth) and w (depth, columns), which lies without gaps.
void grouped(Operand a, const float* w, const float* bias, float* y, long y_row, float* memory, long rows, long depth,
             long columns) {
    if (depth > SHORT_DEPTH) {
        matrix_product(a, w, columns, 1, Result{y, y_row, bias, 0}, memory, rows, depth, columns);
        return;
    }
    const long whole = columns / LANES * LANES;
    if (whole < columns) pack_panels(w + whole, columns, 1, memory, depth, columns - whole);
    for (long r = 0; r < rows; r += ROWS) {  // of y no more at once: its rows often compete for the same lines of the cache
        const long some = rows - r < ROWS ? rows - r : ROWS;
        const Operand x{a.at + r * a.row, a.row, a.next};
        for (long c = 0; c < columns; c += PANEL) {
            const float* start = bias ? bias + c : nullptr;
            const Result result{y + r * y_row + c, y_row, start, 0};
            const long left = columns - c < PANEL ? columns - c : PANEL, straight = left / LANES * LANES;
            if (straight) multiply_panel(x, Panel{w + c, columns, 0}, result, some, straight, depth);
            if (straight < left)
                multiply_panel(x, Panel{memory, LANES, 0},
                               Result{result.to + straight, y_row, start ? start + straight : start, 0}, some,
                               left - straight, depth);
        }
    }
}

// Numbers of memory for the gradients of one group.
long grouped_gradients_memory(long depth, long columns) {
    return packed_size(columns, depth) + PANEL * PART_ROWS;
}

// The gradients of one group from that of y: of a, and added to what is there, of w and the bias. Any of them may be null.
void grouped_gradients(Operand a, const float* w, const float* upstream, long up_row, float* of_a, long of_a_row, float* of_w,
                       float* of_bias, float* memory, long rows, long depth, long columns) {
    float *packed = memory, *edge = memory + packed_size(columns, depth);
    const long whole = columns / LANES * LANES;
    if (of_a) pack_panels(w, 1, columns, packed, columns, depth);
    for (long r = 0; r < rows; r += PART_ROWS) {
        const long some = rows - r < PART_ROWS ? rows - r : PART_ROWS;
        const float* up = upstream + r * up_row;
        if (of_a)
            multiply_panels(Operand{up, up_row, 1}, packed, Result{of_a + r * of_a_row, of_a_row, nullptr, 0}, some, depth,
                            columns);
        if (of_bias)
            for (long c = 0; c < columns; c += LANES) {
                vec sum = load_some(of_bias + c, columns - c);
                for (long i = 0; i < some; i++) sum += load_some(up + i * up_row + c, columns - c);
                store_some(of_bias + c, sum, columns - c);
            }
        if (!of_w) continue;
        const Operand x{a.at + r * a.row, a.next, a.row};  // transposed
        if (whole < columns) pack_panels(up + whole, up_row, 1, edge, some, columns - whole);
        for (long c = 0; c < columns; c += PANEL) {
            const long left = columns - c < PANEL ? columns - c : PANEL, straight = left / LANES * LANES;
            float* to = of_w + c;
            if (straight)
                multiply_panel(x, Panel{up + c, up_row, 0}, Result{to, columns, to, columns}, depth, straight, some);
            if (straight < left)
                multiply_panel(x, Panel{edge, LANES, 0}, Result{to + straight, columns, to + straight, columns}, depth,
                               left - straight, some);
        }
    }
}
