// Weights as integers with scales, as kronecell/ops/quantized.py describes their storage.
#pragma once

#include <algorithm>

namespace kronecell {

// A row of x as whole numbers times `unit`, and their sums over every 64 columns.
struct FixedPoint {
    double unit;
    const int* sums;
};

// w (rows, columns): number k of row i is an integer times scales[i * groups + k / group], or times scales[i] if group is 0.
struct Quantized {
    const unsigned char* at;
    const float* scales;
    long rows, columns;
    long row;  // bytes of a row
    long bits, group, groups;

    bool exact;  // in integers, see quantized_exact.h

    // Memory for the products, in float32 numbers: some rows as floats, and a few as bytes.
    long memory() const { return (exact ? exact_memory() : 0) + TILE * tile_row() + DIRECT_ROWS * byte_row() / 4; }
    // Rows of x as digits, a few rows as bytes, and sums of the rows of x.
    long exact_memory() const { return (3 * exact_rows() + DIRECT_ROWS) * byte_row() / 4 + exact_rows() * byte_row() / EXACT_STEP; }
    // Rows of x that stay in cache while w goes by.
    long exact_rows() const { return std::min(MOST_EXACT, std::max(1L, (1L << 18) / (3 * byte_row() + 1))); }
    long tile_row() const { return (columns + 15) / 16 * 16 + 16; }  // not a power of two: rows would share lines of the cache
    long byte_row() const { return (columns + 63) / 64 * 64; }

    static constexpr long MOST_EXACT = 96;
    static constexpr long EXACT_STEP = 64;  // columns in a register of bytes: groups of scales are whole registers, or there are none
    static constexpr long EXACT_COLUMNS = 1 << 15;  // more would not fit into sums of 32 bits
    static constexpr long TILE = 32;        // rows of w that are converted to floats together
    static constexpr long DIRECT_ROWS = 8;  // rows of w at once that are converted in registers
};

}  // namespace kronecell
