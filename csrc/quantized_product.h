// The product with weights as integers, by the better of its two ways; a kernel file, see widths.h.

// Rows `first` to `last` of w: to (rows, first...) = x (rows, columns) w^T + bias; bias may be null.
APART void quantized_product(const Quantized& w, const float* x, long x_row, const float* bias, float* to, long to_row,
                             long rows, long first, long last, float* memory) {
    if (w.exact)
        exact_product(w, x, x_row, to, to_row, rows, first, last, memory);
    else
        float_product(w, x, x_row, to, to_row, rows, first, last, memory);
    if (!bias) return;
    for (long r = 0; r < rows; r++, to += to_row)
        for (long i = first; i < last; i++) to[i] += bias[i];
}
