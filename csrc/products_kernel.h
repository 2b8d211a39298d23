// One small product out (batch, rows, columns) = a (batch, rows, summed) b (batch, summed, columns), all without gaps, and
// its gradients. They are so small that packing would take longer than the product: whole registers of b and upstream are
// read, up to PANEL numbers behind their end.

INLINE void small_matrix(Operand a, const float* b, long b_row, float* out, long out_row, long rows, long summed, long columns) {
    for (long c = 0; c < columns; c += PANEL)
        multiply_panel(a, Panel{b + c, b_row, 0}, Result{out + c, out_row, nullptr, 0}, rows,
                       columns - c < PANEL ? columns - c : PANEL, summed);
}

void small_product(const SmallProduct& p, const float* a, const float* b, float* out) {
    for (long n = 0; n < p.batch; n++, a += p.rows * p.summed, b += p.summed * p.columns, out += p.rows * p.columns)
        small_matrix(Operand{a, p.summed, 1}, b, p.columns, out, p.columns, p.rows, p.summed, p.columns);
}

// of_a = upstream b^T and of_b = a^T upstream; `transposed` is room for one matrix of b, and PANEL numbers.
void small_gradients(const SmallProduct& p, const float* a, const float* b, const float* upstream, float* of_a, float* of_b,
                     float* transposed) {
    for (long n = 0; n < p.batch; n++) {
        for (long k = 0; k < p.summed; k++)
            for (long j = 0; j < p.columns; j++) transposed[j * p.summed + k] = b[k * p.columns + j];
        small_matrix(Operand{upstream, p.columns, 1}, transposed, p.summed, of_a, p.summed, p.rows, p.columns, p.summed);
        small_matrix(Operand{a, 1, p.summed}, upstream, p.columns, of_b, p.columns, p.summed, p.rows, p.columns);
        a += p.rows * p.summed, of_a += p.rows * p.summed, upstream += p.rows * p.columns;
        b += p.summed * p.columns, of_b += p.summed * p.columns;
    }
}
