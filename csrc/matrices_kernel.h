// c (rows, columns) = start + a (rows, depth) b (depth, columns) for matrices of any shape and strides. b is packed a slice of
// DEEP lines and MOST_COLUMNS columns at a time; TALL rows of a stay in cache while all panels go by.

constexpr long DEEP = 384, TALL = 192, MOST_COLUMNS = 512;

// Numbers of memory that it needs: for what is packed of b, and for TALL rows of a if its rows have to be transposed.
long matrix_memory(long depth, long columns) {
    return packed_size(depth < DEEP ? depth : DEEP, columns < MOST_COLUMNS ? columns : MOST_COLUMNS) +
           (depth < DEEP ? depth : DEEP) * TALL;
}

// `start` may be `to`. Columns of c lie together.
void matrix_product(Operand a, const float* b, long b_row, long b_column, Result c, float* memory, long rows, long depth,
                    long columns) {
    const long slices = (depth + DEEP - 1) / DEEP, each = slices ? (depth + slices - 1) / slices : 0;
    for (long first = 0; first < columns; first += MOST_COLUMNS) {
        const long wide = columns - first < MOST_COLUMNS ? columns - first : MOST_COLUMNS;
        for (long begin = 0; begin < depth || begin == 0; begin += each) {
            const long deep = depth - begin < each ? depth - begin : each;
            float* transposed = memory + packed_size(deep, wide);
            pack_panels(b + begin * b_row + first * b_column, b_row, b_column, memory, deep, wide);
            for (long r = 0; r < rows; r += TALL) {
                const long some = rows - r < TALL ? rows - r : TALL;
                Operand x{a.at + r * a.row + begin * a.next, a.row, a.next};
                if (a.next != 1) {  // as (deep, rows): what a block reads at once lies together
                    for (long k = 0; k < deep; k++)
                        for (long i = 0; i < some; i++) transposed[k * some + i] = x.at[k * a.next + i * a.row];
                    x = Operand{transposed, 1, some};
                }
                float* to = c.to + r * c.row + first;
                const float* start = c.start ? c.start + r * c.start_row + first : nullptr;
                multiply_panels(x, memory, begin ? Result{to, c.row, to, c.row} : Result{to, c.row, start, c.start_row}, some,
                                wide, deep);
            }
            if (!depth) break;
        }
    }
}
