// The products with weights as integers, against the integers themselves; a part of kernels.cpp.
#include "compare.h"
#include "recurrence.h"

#define KERNEL_FILE "recurrence_products.h"
#include "widths.h"
#define KERNEL_FILE "quantized_kernel.h"
#include "widths.h"
#define KERNEL_FILE "quantized_exact.h"
#include "widths.h"
#define KERNEL_FILE "quantized_product.h"
#include "widths.h"

using kronecell::Buffer;
using kronecell::Quantized;

// A row of numbers as kronecell/ops/quantized.py describes its storage.
static void pack(const int* numbers, long columns, long bits, std::vector<unsigned char>& to) {
    if (bits == 8) {
        for (long k = 0; k < columns; k++) to.push_back(static_cast<unsigned char>(numbers[k]));
        return;
    }
    const long padded = (columns + 7) / 8 * 8;
    for (long k = 0; k < padded; k += 32) {
        const long some = padded - k < 32 ? padded - k : 32;
        long low = 0;
        for (const long plane : {4, 2, 1}) {
            if (!(bits & plane)) continue;
            const long wide = some * plane / 8;
            for (long j = 0; j < wide; j++) {
                unsigned byte = 0;
                for (long i = 0; i < 8 / plane; i++) {
                    const long column = k + j + i * wide;
                    const unsigned number = column < columns ? numbers[column] : 0;
                    byte |= (number >> low & ((1u << plane) - 1)) << i * plane;
                }
                to.push_back(static_cast<unsigned char>(byte));
            }
            low += plane;
        }
    }
}

static void quantized(long rows, long depth, long columns, long bits, long group) {
    const long groups = group ? (depth + group - 1) / group : 1;
    const Floats x = drawn(rows * depth), scales = drawn(columns * groups), bias = drawn(columns);
    std::vector<int> numbers(columns * depth);
    for (int& number : numbers) number = static_cast<int>(generator() % (1u << bits)) - (1 << (bits - 1));
    std::vector<unsigned char> stored;
    for (long c = 0; c < columns; c++) pack(numbers.data() + c * depth, depth, bits, stored);
    const Quantized w{stored.data(), scales.data(), columns, depth, static_cast<long>(stored.size()) / columns, bits, group, groups,
                      kronecell::multiplies_bytes() && !group};
    const Buffer memory(w.memory());
    Floats out(rows * columns);
    CALL(quantized_product, w, x.data(), depth, bias.data(), out.data(), columns, rows, 0, columns, memory.get());
    std::vector<Sum> want(out.size());
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++) {
            want[r * columns + c].add(bias[c], 1);
            for (long k = 0; k < depth; k++)
                want[r * columns + c].add(x[r * depth + k],
                                          (double)scales[c * groups + (group ? k / group : 0)] * numbers[c * depth + k]);
        }
    check("quantized " + std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(columns) + ", " +
              std::to_string(bits) + " bits, group " + std::to_string(group), out, want);
}

void quantized_products() {
    for (const long rows : {1, 3, 40})
        for (const long depth : {1, 31, 64, 70, 129, 300})
            for (const long columns : {1, 8, 13, 67})
                for (long bits = 3; bits <= 8; bits++)
                    for (const long group : {0, 7, 16, 48}) quantized(rows, depth, columns, bits, group);
}
