// A test of the kernel bodies without torch: every one against naive loops, for the register width at hand. Built for this
// machine and, with a cross compiler, for aarch64 (make test-aarch64). Not part of the library.
#include <memory>

#include "compare.h"

#define KERNEL_FILE "columns_kernel.h"
#include "widths.h"
#define KERNEL_FILE "sums_kernel.h"
#include "widths.h"
#define KERNEL_FILE "fold_kernel.h"
#include "widths.h"
#define KERNEL_FILE "matrices_kernel.h"
#include "widths.h"
#define KERNEL_FILE "grouped_kernel.h"
#include "widths.h"

using kronecell::Buffer;
using kronecell::FoldSizes;
using kronecell::Operand;
using kronecell::Result;
static void few_columns(long rows, long depth, long columns, bool bytes) {
    Floats w = drawn(columns * depth), x = drawn(rows * depth), out(rows * columns), g = drawn(rows * columns);
    std::vector<uint8_t> as_bytes(rows * depth);
    for (long i = 0; bytes && i < rows * depth; i++) x[i] = as_bytes[i] = generator() & 255;
    const void* from = bytes ? static_cast<const void*>(as_bytes.data()) : x.data();
    const Buffer memory(CALL(columns_memory, bytes, depth, columns));
    CALL(prepare_columns, w.data(), memory.get(), depth, columns);
    CALL(few_columns, from, bytes, memory.get(), out.data(), rows, depth, columns, nullptr, 0);
    std::vector<Sum> want(rows * columns), sums(columns * depth);
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++)
            for (long k = 0; k < depth; k++) {
                want[r * columns + c].add(x[r * depth + k], w[c * depth + k]);
                sums[c * depth + k].add(x[r * depth + k], g[r * columns + c]);
            }
    const std::string name = std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(columns);
    check("few_columns " + name + (bytes ? " of bytes" : ""), out, want);
    if (depth < CALL(least_depth)) return;
    Floats of_w(columns * depth);
    const Buffer tiles(CALL(sums_memory, bytes, depth, columns), true);
    CALL(column_sums, from, bytes, g.data(), of_w.data(), tiles.get(), rows, depth, columns);
    check("column_sums " + name + (bytes ? " of bytes" : ""), of_w, sums);
}

static void fold(FoldSizes n, bool keep) {
    const long lines = n.shared * n.others, next = n.columns / n.shared;
    Floats x = drawn(n.rows * n.places * n.depth), w = drawn(n.columns * n.depth), f = drawn(lines * n.places);
    Floats z(n.rows * n.others * n.columns), y(n.rows * n.places * n.columns), v(n.rows * lines * n.depth);
    const bool with_v = keep && n.depth >= CALL(least_depth);
    const Buffer memory(CALL(fold_memory, false, keep, with_v, n), true);
    CALL(fold, x.data(), false, w.data(), f.data(), keep ? y.data() : nullptr, z.data(), with_v ? v.data() : nullptr,
         memory.get(), n);
    std::vector<Sum> in_y(y.size()), in_z(z.size()), in_v(v.size()), in_w(w.size()), in_f(f.size());
    const Floats up = drawn(z.size());
    for (long r = 0; r < n.rows; r++)
        for (long p = 0; p < n.places; p++)
            for (long c = 0; c < n.columns; c++) {
                const long line = (r * n.places + p), g = c / n.inner % n.shared;
                const long rest = c / (n.inner * n.shared) * n.inner + c % n.inner;
                Sum& sum = in_y[line * n.columns + c];
                for (long k = 0; k < n.depth; k++) sum.add(x[line * n.depth + k], w[c * n.depth + k]);
                for (long o = 0; o < n.others; o++) {
                    const long at = ((r * n.shared + g) * n.others + o) * next + rest, factor = (g * n.others + o) * n.places + p;
                    in_z[at].value += sum.value * f[factor], in_z[at].size += std::fabs(sum.size * f[factor]);
                    in_f[factor].value += sum.value * up[at], in_f[factor].size += std::fabs(sum.size * up[at]);
                    for (long k = 0; k < n.depth; k++) in_w[c * n.depth + k].add(x[line * n.depth + k], (double)f[factor] * up[at]);
                }
            }
    for (long r = 0; r < n.rows; r++)
        for (long l = 0; l < lines; l++)
            for (long p = 0; p < n.places; p++)
                for (long k = 0; k < n.depth; k++)
                    in_v[(r * lines + l) * n.depth + k].add(f[l * n.places + p], x[(r * n.places + p) * n.depth + k]);
    const std::string name = "fold of " + std::to_string(n.rows) + " rows, " + std::to_string(n.columns) + " columns: ";
    check(name + "z", z, in_z);
    if (keep) check(name + "y", y, in_y);
    if (!with_v) return;
    check(name + "v", v, in_v);
    Floats of_w(w.size()), of_f(f.size());
    const Buffer scratch(CALL(fold_gradients_memory, n), true);
    CALL(fold_gradients, y.data(), v.data(), up.data(), of_w.data(), of_f.data(), scratch.get(), n);
    check(name + "gradient of w", of_w, in_w);
    check(name + "gradient of f", of_f, in_f);
}

static void matrices(long rows, long depth, long columns, bool a_transposed, bool b_transposed) {
    const Floats a = drawn(rows * depth), b = drawn(depth * columns), up = drawn(rows * columns), bias = drawn(columns);
    Floats c(rows * columns), y(rows * columns), of_a(rows * depth), of_b(depth * columns), of_bias(columns);
    const Operand x = a_transposed ? Operand{a.data(), 1, rows} : Operand{a.data(), depth, 1};
    const long b_row = b_transposed ? 1 : columns, b_column = b_transposed ? depth : 1;
    const Buffer memory(CALL(matrix_memory, depth, columns));
    CALL(matrix_product, x, b.data(), b_row, b_column, Result{c.data(), columns, nullptr, 0}, memory.get(), rows, depth, columns);
    std::vector<Sum> want(c.size()), in_y(c.size()), in_a(a.size()), in_b(b.size()), in_bias(columns);
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < columns; j++) {
            in_bias[j].add(up[r * columns + j], 1), in_y[r * columns + j].add(bias[j], 1);
            for (long k = 0; k < depth; k++) {
                const float number = x.at[r * x.row + k * x.next];
                want[r * columns + j].add(number, b[k * b_row + j * b_column]);
                in_y[r * columns + j].add(number, b[k * columns + j]);
                in_a[r * depth + k].add(up[r * columns + j], b[k * columns + j]);
                in_b[k * columns + j].add(number, up[r * columns + j]);
            }
        }
    const std::string name = std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(columns);
    check("product " + name, c, want);
    const Buffer some(CALL(grouped_memory, depth, columns)), more(CALL(grouped_gradients_memory, depth, columns));
    CALL(grouped, x, b.data(), bias.data(), y.data(), columns, some.get(), rows, depth, columns);
    check("grouped " + name, y, in_y);
    CALL(grouped_gradients, x, b.data(), up.data(), columns, of_a.data(), depth, of_b.data(), of_bias.data(), more.get(), rows,
         depth, columns);
    check("grouped " + name + ": gradient of a", of_a, in_a);
    check("grouped " + name + ": gradient of w", of_b, in_b);
    check("grouped " + name + ": gradient of the bias", of_bias, in_bias);
}

int main() {
    const int width = kronecell::register_width();
    for (const bool bytes : {false, true})
        for (const long rows : {1, 5, 12, 41, 130})
            for (const long depth : {1, 18, 96, 101, 513})
                for (const long columns : {1, 2, 4, 7, 8, 13, 16, 21, 33}) few_columns(rows, depth, columns, bytes);
    for (const long rows : {1, 3, 18})
        for (const bool keep : {false, true})
            for (const FoldSizes& n : {FoldSizes{rows, 43, 97, 4, 1, 4, 4}, FoldSizes{rows, 9, 5, 4, 2, 2, 3},
                                       FoldSizes{rows, 50, 130, 8, 2, 2, 5}, FoldSizes{rows, 20, 99, 3, 3, 1, 1},
                                       FoldSizes{rows, 12, 96, 2L * width, 2, 1, 2}})
                fold(n, keep);
    for (const long rows : {1, 7, 30, 200})
        for (const long depth : {1, 16, 33, 400})
            for (const long columns : {1, 8, 19, 64, 530})
                for (const int turned : {0, 1, 2, 3}) matrices(rows, depth, columns, turned & 1, turned & 2);
    quantized_products();
    std::printf("width %d: %s\n", width, failures ? "failed" : "all kernels are right");
    return failures ? 1 : 0;
}
