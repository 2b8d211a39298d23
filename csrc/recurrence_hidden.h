// Products with U, h U^T and their gradients for h, in all its forms; a kernel file, see widths.h.

long hidden_memory(const Hidden& u, bool pack, bool back) {
    if (!u.rank) {
        if (back) return columns_memory(u.columns(), u.width, pack);
        return pack ? columns_memory(u.width, u.columns(), true) : 0;
    }
    if (back) return columns_memory(u.narrow(), u.width, pack);
    return u.by_gate ? u.gates * columns_memory(u.rank, u.size, pack) : columns_memory(u.rank, u.columns(), pack);
}

// `many`: U is read often enough to be packed. A dense U is packed by the number of steps alone, see PACKED_STEPS.
void hidden_prepare(Prepared* p, const Hidden& u, bool many, bool back, float* memory) {
    p->u = u;
    p->by_dots = u.integers || (!u.rank && !back && !many);
    if (p->by_dots) return;
    if (!u.rank) {
        p->columns[0] = back ? columns_of(u.first, u.width, u.columns(), u.width, many, memory)
                             : columns_of_transposed(u.first, u.width, u.columns(), memory);
    } else if (back) {
        p->columns[0] = columns_of(u.first, u.width, u.narrow(), u.width, many, memory);
    } else if (!u.by_gate) {
        p->columns[0] = columns_of(u.second, u.columns(), u.rank, u.columns(), many, memory);
    } else {
        for (long g = 0; g < u.gates; g++) {
            p->columns[g] = columns_of(u.second + g * u.rank * u.size, u.size, u.rank, u.size, many, memory);
            memory += columns_memory(u.rank, u.size, many);
        }
    }
}

// to (rows, gates * size) = h (rows, width) U^T; `narrow` is memory for u.between(rows) numbers.
INLINE void hidden_product(const Prepared& p, const float* h, float* narrow, float* to, long rows) {
    const Hidden& u = p.u;
    const long columns = u.columns(), between = u.narrow();
    if (u.integers) {
        quantized_product(*u.integers, h, u.width, nullptr, to, columns, rows, 0, columns, narrow);
    } else if (p.by_dots) {
        dots(h, u.width, u.first, u.width, to, columns, rows, columns, u.width);
    } else if (!u.rank) {
        multiply_columns(h, u.width, p.columns[0], to, columns, rows, false);
    } else {
        dots(h, u.width, u.first, u.width, narrow, between, rows, between, u.width);
        for (long g = 0; g < (u.by_gate ? u.gates : 1); g++)
            multiply_columns(narrow + g * u.rank, between, p.columns[g], to + g * u.size, columns, rows, false);
        if (u.sparse.count) add_sparse(u.sparse, h, u.width, to, columns, rows, narrow + rows * between);
    }
}

// to (rows, width) = upstream (rows, gates * size) U, or added to it.
INLINE void hidden_product_back(const Prepared& p, const float* upstream, float* narrow, float* to, long rows, bool add) {
    const Hidden& u = p.u;
    const long columns = u.columns(), between = u.narrow();
    if (!u.rank) {
        multiply_columns(upstream, columns, p.columns[0], to, u.width, rows, add);
        return;
    }
    const long parts = u.by_gate ? u.gates : 1, wide = u.by_gate ? u.size : columns;
    for (long g = 0; g < parts; g++)
        dots(upstream + g * wide, columns, u.second + g * u.rank * wide, wide, narrow + g * u.rank, between, rows, u.rank, wide);
    multiply_columns(narrow, between, p.columns[0], to, u.width, rows, add);
    if (u.sparse.count) add_sparse(u.sparse, upstream, columns, to, u.width, rows, narrow + rows * between);
}

// to (rows, gates * size) = x (rows, width) U^T, plus the bias if there is one.
void linear_rows(const Prepared& p, const float* x, const float* bias, float* narrow, float* to, long rows) {
    const long columns = p.u.columns();
    hidden_product(p, x, narrow, to, rows);
    for (long r = 0; bias && r < rows; r++)
        for (long j = 0; j < columns; j++) to[r * columns + j] += bias[j];
}
