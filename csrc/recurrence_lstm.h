// The steps of an LSTM; a kernel file, see widths.h.

// The activated gates and the next state of some rows; `active` and `cells` may be null.
APART void lstm_step(const float* gates, long gates_row, const float* sums, float* c, float* h, float* active, float* cells,
                     long rows, long size) {
    for (long r = 0; r < rows; r++) {
        for (long j = 0; j < size; j += LANES) {
            const long some = size - j;
            vec i = sigmoid(load_some(gates + j, some) + load_some(sums + j, some));
            vec f = sigmoid(load_some(gates + size + j, some) + load_some(sums + size + j, some));
            vec g = tanh_of(load_some(gates + 2 * size + j, some) + load_some(sums + 2 * size + j, some));
            vec o = sigmoid(load_some(gates + 3 * size + j, some) + load_some(sums + 3 * size + j, some));
            const vec now = f * load_some(c + j, some) + i * g;
            store_some(c + j, now, some);
            store_some(h + j, o * tanh_of(now), some);
            if (active) {
                store_some(active + j, i, some), store_some(active + size + j, f, some);
                store_some(active + 2 * size + j, g, some), store_some(active + 3 * size + j, o, some);
                store_some(cells + j, now, some);
            }
        }
        gates += gates_row, sums += 4 * size, c += size, h += size;
        if (active) active += 4 * size, cells += size;
    }
}

// The gradients of the sums in the gates from those of h (`more`, if there is any, is added) and c, whose gradient goes back.
APART void lstm_step_back(const float* active, const float* before, const float* cells, const float* dh, const float* more,
                          float* dc, float* d_gates, long rows, long size) {
    for (long r = 0; r < rows; r++) {
        for (long j = 0; j < size; j += LANES) {
            const long some = size - j;
            const vec i = load_some(active + j, some), f = load_some(active + size + j, some);
            const vec g = load_some(active + 2 * size + j, some), o = load_some(active + 3 * size + j, some);
            const vec tanh = tanh_of(load_some(cells + j, some));
            vec up = load_some(dh + j, some);
            if (more) up += load_some(more + j, some);
            const vec down = load_some(dc + j, some) + up * o * (1.0f - tanh * tanh);
            store_some(d_gates + j, down * g * i * (1.0f - i), some);
            store_some(d_gates + size + j, down * load_some(before + j, some) * f * (1.0f - f), some);
            store_some(d_gates + 2 * size + j, down * i * (1.0f - g * g), some);
            store_some(d_gates + 3 * size + j, up * tanh * o * (1.0f - o), some);
            store_some(dc + j, down * f, some);
        }
        active += 4 * size, before += size, cells += size, dh += size, dc += size, d_gates += 4 * size;
        if (more) more += size;
    }
}

// h before a projection.
void lstm_states(const float* active, const float* cells, float* h, long rows, long size) {
    for (long r = 0; r < rows; r++, active += 4 * size, cells += size, h += size)
        for (long j = 0; j < size; j += LANES)
            store_some(h + j, load_some(active + 3 * size + j, size - j) * tanh_of(load_some(cells + j, size - j)), size - j);
}

long lstm_memory(const Hidden& u, long rows) { return rows * (u.columns() + u.size) + u.between(rows); }

// All steps of `some` rows of the batch from row `start` on; h and c hold the first state and then the last one.
void lstm_run(const Prepared& p, const Gates& gates, const Steps& steps, const LstmForward& to, long start, long some,
              float* memory) {
    const long size = p.u.size, width = p.u.width;
    float *sums = memory, *narrow = sums + some * p.u.columns(), *full = narrow + p.u.between(some);
    float *h = to.h + start * width, *c = to.c + start * size;
    for (long turn = 0; turn < steps.count; turn++) {
        const long t = steps.at(turn), rows = steps.of_part(t, start, some), at = steps.first[t] + start;
        if (!rows) continue;
        hidden_product(p, h, narrow, sums, rows);
        lstm_step(gates.at + gates.steps[t] + start * gates.row, gates.row, sums, c, to.project ? full : h,
                  to.active ? to.active + at * 4 * size : nullptr, to.active ? to.cells + at * size : nullptr, rows, size);
        if (to.project) dots(full, size, to.project, size, h, width, rows, width, size);
        memcpy(to.output + at * width, h, sizeof(float) * rows * width);
    }
}

// The same backwards: dh and dc hold the gradients of the last state and then those of the first. `project` is the matrix of
// a projection (width, size) as Columns.
void lstm_run_back(const Prepared& p, const Columns* project, const Steps& steps, const LstmBackward& g, long start, long some,
                   float* memory) {
    const long size = p.u.size, width = p.u.width;
    float *narrow = memory, *full = narrow + p.u.between(some);
    float *dh = g.dh + start * width, *dc = g.dc + start * size;
    for (long turn = steps.count - 1; turn >= 0; turn--) {
        const long t = steps.at(turn), rows = steps.of_part(t, start, some), at = steps.first[t] + start;
        if (!rows) continue;
        const float *up = dh, *more = g.d_output ? g.d_output + at * width : nullptr;
        if (project) {
            float* ups = g.ups + at * width;
            for (long i = 0; i < rows * width; i++) ups[i] = more ? dh[i] + more[i] : dh[i];
            multiply_columns(ups, width, *project, full, size, rows, false);
            up = full, more = nullptr;
        }
        // Rows that the step before had go on from its cells, others from the first state.
        const long previous = turn ? steps.at(turn - 1) : 0, had = turn ? steps.of_part(previous, start, rows) : 0;
        float* d_gates = g.d_gates + at * 4 * size;
        for (long r = 0, end = had; r < rows; r = end, end = rows) {
            if (r == end) continue;
            const float* before = r < had ? g.cells + (steps.first[previous] + start + r) * size : g.c + (start + r) * size;
            lstm_step_back(g.active + (at + r) * 4 * size, before, g.cells + (at + r) * size, up + r * (project ? size : width),
                           more ? more + r * width : nullptr, dc + r * size, d_gates + r * 4 * size, end - r, size);
        }
        hidden_product_back(p, d_gates, narrow, dh, rows, false);
    }
}
