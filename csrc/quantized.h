// Weights as integers with scales, as kronecell/ops/quantized.py describes their storage.
#pragma once

namespace kronecell {

// w (rows, columns): number k of row i is an integer times scales[i * groups + k / group], or times scales[i] if group is 0.
struct Quantized {
    const unsigned char* at;
    const float* scales;
    long rows, columns;
    long row;  // bytes of a row
    long bits, group, groups;

    // Memory for the products, in float32 numbers: some rows as floats, and a few as bytes.
    long memory() const { return TILE * tile_row() + DIRECT_ROWS * byte_row() / 4; }
    long tile_row() const { return (columns + 15) / 16 * 16 + 16; }  // not a power of two: rows would share lines of the cache
    long byte_row() const { return (columns + 63) / 64 * 64; }

    static constexpr long TILE = 32;        // rows of w that are converted to floats together
    static constexpr long DIRECT_ROWS = 8;  // rows of w at once that are converted in registers
};

}  // namespace kronecell
