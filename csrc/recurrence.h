// What the kernels of the recurrences read and write, the same for every register width.
#pragma once

#include "operands.h"
#include "quantized.h"
#include "sparse.h"

namespace kronecell {

// h U^T for U (gates * size, width): dense, or In (rank, width) and Out (rank, gates * size), or, with `by_gate`,
// In (gates * rank, width) and Out (gates, rank, size).
struct Hidden {
    long gates, size, width;
    long rank;  // 0 for a dense U
    bool by_gate;
    const float* first;   // U or In
    const float* second;  // Out
    const Quantized* integers = nullptr;  // a dense U of integers, in place of `first`
    Sparse sparse{};  // what is added to In and Out, transposed if backward; no entries if there is none

    long narrow() const { return by_gate ? gates * rank : rank; }
    // Memory for numbers between x and h U^T.
    long between(long rows) const { return integers ? integers->memory() : rows * narrow() + sparse.memory(rows); }
    long columns() const { return gates * size; }
};

// W (depth, columns) for the micro-kernel: whole panels packed, or as they lie; what is left of the columns is always packed.
struct Columns {
    Panel body, tail;
    long depth, columns;
};

// U as it is read at every step, forward or backward; packed once for all of them where that pays.
struct Prepared {
    Hidden u;
    bool by_dots;  // a dense U, forward, that is not packed; always if it is of integers
    Columns columns[4];
};

// Where the steps lie: step t has rows[t] rows of the batch, and its first one is row first[t] of all rows. Steps run from 0
// on, or from the last one if `reverse`.
struct Steps {
    long count, batch;
    bool reverse;
    const long* first;
    const long* rows;

    long at(long turn) const { return reverse ? count - 1 - turn : turn; }
    // Rows of step t among `some` rows of the batch from row `start` on: a shorter sequence is later in the batch.
    long of_part(long t, long start, long some) const {
        const long left = rows[t] - start;
        return left < 0 ? 0 : left < some ? left : some;
    }
};

// Finished gates: row b of step t is at + steps[t] + b * row.
struct Gates {
    const float* at;
    const long* steps;
    long row;
};

// Rows of all steps lie one after the other in what is per step, in the order of the input; h and c are (batch, ...) and hold
// the first state before, the last one after.
struct LstmForward {
    const float* project;  // (width, size), or null
    float *output, *h, *c, *active, *cells;  // the last two may be null
};

struct LstmBackward {
    const float *d_output, *active, *cells, *c;  // d_output may be null
    float *d_gates, *dh, *dc, *ups;  // ups: gradients of the output and of what goes on from it; only with a projection
};

struct GruForward {
    const float* bias_n;  // may be null
    float *output, *h, *active;  // active may be null
};

struct GruBackward {
    const float *d_output, *output, *active, *h;  // d_output may be null
    float *d_gates, *d_product, *dh;  // d_product: gradients of h U^T + bias_n
};

// Rows of the batch that one thread takes through all steps, at most: their states stay in cache.
constexpr long PART_ROWS = 128;
// A product is summed up in pieces of this depth, whatever else: a row has the same bits alone and among others.
constexpr long DEPTH = 256;
// From this many steps on, a dense U is packed once. It does not depend on the batch, as the two ways differ by rounding.
constexpr long PACKED_STEPS = 6;

}  // namespace kronecell
