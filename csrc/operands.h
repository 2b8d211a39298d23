// What the micro-kernel reads and writes, the same for every register width. All steps count numbers.
#pragma once

namespace kronecell {

// x (rows, depth): number k of row i is at[i * row + k * next].
struct Operand {
    const float* at;
    long row, next;
};

// w (depth, columns) in registers: register v of line k is at[k * next + v / 2 * apart + v % 2 * LANES ...]. `apart` is
// the distance of panels of two registers and is not read for one panel.
struct Panel {
    const float* at;
    long next, apart;
};

// Where a product is written: to[i * row ...] = start[i * start_row ...] + product. No `start` means zeros; a start_row of
// 0 is one line for all rows, such as a bias; start may be `to` itself.
struct Result {
    float* to;
    long row;
    const float* start;
    long start_row;
};

// Sizes of a fold (fold_kernel.h).
struct FoldSizes {
    long rows, places, depth, columns, shared, inner, others;
};

}  // namespace kronecell
