// quantized_linear: x w^T + bias for w as integers. The schema and what the arguments mean are in kronecell/ops/quantized.py.
#include <optional>

#include "buffer.h"
#include "quantized_border.h"
#include "recurrence.h"

#define KERNEL_FILE "recurrence_products.h"
#include "widths.h"
#define KERNEL_FILE "quantized_kernel.h"
#include "widths.h"
#define KERNEL_FILE "quantized_exact.h"
#include "widths.h"
#define KERNEL_FILE "quantized_product.h"
#include "widths.h"

namespace kronecell {

static Tensor quantized_linear(Tensor x, Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t bits, int64_t group) {
    const char* op = "quantized_linear";
    STD_TORCH_CHECK(x.dim() >= 1, "kronecell::quantized_linear: expected x of one dimension or more");
    check_cpu(x, op, "x"), check_cpu(weight, op, "weight"), check_cpu(scales, op, "scales");
    if (bias) check_cpu(*bias, op, "bias");
    if (!is_float(x) || (bias && !is_float(*bias)) || !is_readable(weight, scales, bits))
        return dispatch<Tensor>("kronecell_reference::quantized_linear", "", x, weight, scales, bias, bits, group);
    const long columns = x.size(x.dim() - 1);
    x = made_contiguous(x), weight = made_contiguous(weight), scales = made_contiguous(scales);
    const Quantized w = check_quantized(op, weight, scales, bits, group, columns);
    if (bias) {
        check_shape(*bias, {w.rows}, op, "bias");
        bias = made_contiguous(*bias);
    }
    std::vector<int64_t> shape;
    long rows = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) shape.push_back(x.size(d)), rows *= x.size(d);
    shape.push_back(w.rows);
    const Tensor out = new_floats(x, shape);
    const float *from = floats(x), *plus = bias ? floats(*bias) : nullptr;
    float* to = floats_of(out);
    const long tiles = (w.rows + Quantized::TILE - 1) / Quantized::TILE;
    if (rows)
        in_parallel(tiles, rows * w.rows * columns, [&](long first, long last) {
            const Buffer memory(w.memory());
            CALL(quantized_product, w, from, columns, plus, to, w.rows, rows, first * Quantized::TILE,
                 std::min(w.rows, last * Quantized::TILE), memory.get());
        });
    return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int bits, int group) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) { m.impl("quantized_linear", TORCH_BOX(&quantized_linear)); }

}  // namespace kronecell
