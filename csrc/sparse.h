// A sparse matrix S (outputs, inputs) as the kernels read it.
#pragma once

#include <cstdint>

namespace kronecell {

// From this many rows on, rows are transposed: one entry meets a register of them. With windows a single row is faster.
constexpr long MANY_ROWS = 3, MANY_ROWS_OF_WINDOWS = 5;

// Entries of S in the order in which AVX-512 multiplies them, made once by sparse_prepared.
//
// A bundle is 6 groups of 16 outputs, a lane for each output. In every turn each lane takes at most one entry from the same
// window of 32 inputs, which are in two registers; the next window begins `stride` inputs later. The entries that find no
// turn, a few percent, come before all others of their bundle.
struct Windows {
    static constexpr long GROUPS = 6, LANES = 16, OUTPUTS = GROUPS * LANES, INPUTS = 32;
    static constexpr long MASKS = 8;      // of a turn; those after the sixth are zero
    static constexpr int INDEX_BITS = 5;  // of an input in its window: the indices of 6 groups are in one register
    static constexpr int LANE_BITS = 7;   // of an output in its bundle
    static constexpr long FEW = 8;        // entries of a group in a turn at most, if `narrow`

    long stride, turns, bundles;
    bool narrow;              // values of a group in a turn are half a register
    const uint32_t* indices;  // (bundles, turns, LANES)
    const uint16_t* masks;    // (bundles, turns, MASKS): lanes that have an entry
    const int32_t* left;      // (bundles): entries without a turn
    const int32_t* ends;      // (bundles, OUTPUTS): entries with a turn of all outputs up to this one
    const uint32_t* at;       // of each entry, by output: output in its bundle and, from LANE_BITS on, input
    const float* values;      // of each entry, by turn
    const float* ordered;     // the same by output

    // Where window t begins; the last ones are moved back into x.
    long begin(long t, long inputs) const {
        const long last = inputs > INPUTS ? inputs - INPUTS : 0;
        return t * stride < last ? t * stride : last;
    }
};

// As it is stored, see kronecell/ops/sparse.py, and as prepared.
struct Sparse {
    long outputs = 0, inputs = 0, count = 0, block = 1;
    const float* values = nullptr;
    const int64_t* places = nullptr;
    const long* starts = nullptr;  // first entry of every `block` outputs, and all of them
    const Windows* windows = nullptr;  // in place of values, places and starts

    bool many(long rows) const { return rows >= (windows ? MANY_ROWS_OF_WINDOWS : MANY_ROWS); }
    // For the transposed rows, in the widest registers.
    long memory(long rows) const { return count && many(rows) ? 16 * (inputs + outputs) : 0; }
};

}  // namespace kronecell
