// The steps of a GRU; a kernel file, see widths.h.

// The next state of some rows, and r z n with h U_n^T + bias_n, if `active` is not null.
APART void gru_step(const float* gates, long gates_row, const float* sums, const float* bias_n, float* h, float* active,
                    long rows, long size) {
    for (long i = 0; i < rows; i++) {
        for (long j = 0; j < size; j += LANES) {
            const long some = size - j;
            vec r = sigmoid(load_some(gates + j, some) + load_some(sums + j, some));
            vec z = sigmoid(load_some(gates + size + j, some) + load_some(sums + size + j, some));
            vec product = load_some(sums + 2 * size + j, some);
            if (bias_n) product += load_some(bias_n + j, some);
            const vec n = tanh_of(load_some(gates + 2 * size + j, some) + r * product);
            store_some(h + j, n + z * (load_some(h + j, some) - n), some);
            if (active) {
                store_some(active + j, r, some), store_some(active + size + j, z, some);
                store_some(active + 2 * size + j, n, some), store_some(active + 3 * size + j, product, some);
            }
        }
        gates += gates_row, sums += 3 * size, h += size;
        if (active) active += 4 * size;
    }
}

// The gradients of the sums in the gates, and of h U^T, whose last third differs; dh becomes the part of the gradient of the
// state before that does not go through U.
APART void gru_step_back(const float* active, const float* before, const float* more, float* dh, float* d_gates,
                         float* d_product, long rows, long size) {
    for (long i = 0; i < rows; i++) {
        for (long j = 0; j < size; j += LANES) {
            const long some = size - j;
            const vec r = load_some(active + j, some), z = load_some(active + size + j, some);
            const vec n = load_some(active + 2 * size + j, some), product = load_some(active + 3 * size + j, some);
            vec up = load_some(dh + j, some);
            if (more) up += load_some(more + j, some);
            const vec n_sum = up * (1.0f - z) * (1.0f - n * n);
            const vec r_sum = n_sum * product * r * (1.0f - r);
            const vec z_sum = up * (load_some(before + j, some) - n) * z * (1.0f - z);
            store_some(d_gates + j, r_sum, some), store_some(d_product + j, r_sum, some);
            store_some(d_gates + size + j, z_sum, some), store_some(d_product + size + j, z_sum, some);
            store_some(d_gates + 2 * size + j, n_sum, some), store_some(d_product + 2 * size + j, n_sum * r, some);
            store_some(dh + j, up * z, some);
        }
        active += 4 * size, before += size, dh += size, d_gates += 3 * size, d_product += 3 * size;
        if (more) more += size;
    }
}

long gru_memory(const Hidden& u, long rows) { return rows * u.columns() + u.between(rows); }

// All steps of `some` rows of the batch from row `start` on; h holds the first state and then the last one.
void gru_run(const Prepared& p, const Gates& gates, const Steps& steps, const GruForward& to, long start, long some,
             float* memory) {
    const long size = p.u.size;
    float *sums = memory, *narrow = sums + some * p.u.columns(), *h = to.h + start * size;
    for (long turn = 0; turn < steps.count; turn++) {
        const long t = steps.at(turn), rows = steps.of_part(t, start, some), at = steps.first[t] + start;
        if (!rows) continue;
        hidden_product(p, h, narrow, sums, rows);
        gru_step(gates.at + gates.steps[t] + start * gates.row, gates.row, sums, to.bias_n, h,
                 to.active ? to.active + at * 4 * size : nullptr, rows, size);
        memcpy(to.output + at * size, h, sizeof(float) * rows * size);
    }
}

// The same backwards: dh holds the gradient of the last state and then that of the first.
void gru_run_back(const Prepared& p, const Steps& steps, const GruBackward& g, long start, long some, float* memory) {
    const long size = p.u.size;
    float *narrow = memory, *dh = g.dh + start * size;
    for (long turn = steps.count - 1; turn >= 0; turn--) {
        const long t = steps.at(turn), rows = steps.of_part(t, start, some), at = steps.first[t] + start;
        if (!rows) continue;
        // Rows that the step before had go on from its output, others from the first state.
        const long previous = turn ? steps.at(turn - 1) : 0, had = turn ? steps.of_part(previous, start, rows) : 0;
        float* d_product = g.d_product + at * 3 * size;
        for (long r = 0, end = had; r < rows; r = end, end = rows) {
            if (r == end) continue;
            const float* before = r < had ? g.output + (steps.first[previous] + start + r) * size : g.h + (start + r) * size;
            gru_step_back(g.active + (at + r) * 4 * size, before, g.d_output ? g.d_output + (at + r) * size : nullptr,
                          dh + r * size, g.d_gates + (at + r) * 3 * size, d_product + r * 3 * size, end - r, size);
        }
        hidden_product_back(p, d_product, narrow, dh, rows, true);
    }
}
