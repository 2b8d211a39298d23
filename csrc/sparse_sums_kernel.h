// Some numbers of upstream^T x, those at the places of a sparse matrix; a kernel file, see widths.h.

constexpr long SAMPLED_ROWS = 64;  // at once, transposed: they stay in cache

long sampled_memory(long outputs, long inputs) { return SAMPLED_ROWS * (outputs + inputs); }

INLINE void sampled_lines(const float* from, long columns, long rows, float* to) {
    const long whole = rows / 4 * 4;
    if (rows < SAMPLED_ROWS) memset(to, 0, sizeof(float) * columns * SAMPLED_ROWS);
    for (long r = 0; r < rows; r += 4) {
        long c = 0;
        for (; r < whole && c + 4 <= columns; c += 4)
            transpose4(from + r * columns + c, columns, to + c * SAMPLED_ROWS + r, SAMPLED_ROWS);
        for (; c < columns; c++)
            for (long q = r; q < rows && q < r + 4; q++) to[c * SAMPLED_ROWS + q] = from[q * columns + c];
    }
}

// Added to `to` (count, block).
void sampled_sums(const float* upstream, const float* x, const int64_t* places, long count, long block, long outputs, long inputs,
                  long rows, float* to, float* memory) {
    float *ups = memory, *lines = ups + SAMPLED_ROWS * outputs;
    for (long r = 0; r < rows; r += SAMPLED_ROWS) {
        const long some = rows - r < SAMPLED_ROWS ? rows - r : SAMPLED_ROWS;
        sampled_lines(upstream + r * outputs, outputs, some, ups);
        sampled_lines(x + r * inputs, inputs, some, lines);
        long output = 0, start = 0;
        for (long e = 0; e < count; e++) {
            while (places[e] >= start + inputs) start += inputs, output += block;
            const float* line = lines + (places[e] - start) * SAMPLED_ROWS;
            for (long b = 0; b < block; b++) {
                const float* up = ups + (output + b) * SAMPLED_ROWS;
                vec sum = {0};
                UNROLL(16)
                for (int k = 0; k < SAMPLED_ROWS; k += LANES) sum += *(const vec*)(up + k) * *(const vec*)(line + k);
                float total = 0;
                for (int i = 0; i < LANES; i++) total += sum[i];
                to[e * block + b] += total;
            }
        }
    }
}
