// gru: all steps of a GRU over finished gates, and gru_backward, its gradients back through time; quantized_gru: the same
// over U as integers. The schemas and what the arguments mean are in kronecell/ops/recurrence.py and quantized.py.
#include "quantized_border.h"
#include "recurrence_border.h"

#define KERNEL_FILE "recurrence_gates.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_products.h"
#include "widths.h"
#define KERNEL_FILE "quantized_kernel.h"
#include "widths.h"
#define KERNEL_FILE "quantized_exact.h"
#include "widths.h"
#define KERNEL_FILE "quantized_product.h"
#include "widths.h"
#define KERNEL_FILE "sparse_kernel.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_hidden.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_gru.h"
#include "widths.h"

namespace kronecell {

using GruResult = std::tuple<Tensor, Tensor, Tensor>;
using GruGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

static GruResult gru_over(const char* op, Tensor gates, const Layout& layout, const Hidden& u, const MaybeTensor& bias_n,
                          const Tensor& h, bool keep) {
    const long size = h.size(1);
    if (bias_n) check_shape(*bias_n, {size}, op, "bias_n");
    gates = gates_read(op, gates, u);
    const Tensor output = new_floats(gates, rows_by(gates, size)), h_n = copy_of(h);
    const Tensor active = new_floats(gates, keep ? rows_by(gates, 4 * size) : std::vector<int64_t>{0});
    const GruForward to{floats_or_null(bias_n), floats_of(output), floats_of(h_n), keep ? floats_of(active) : nullptr};
    std::vector<long> offsets;
    const Gates from = gates_of(gates, layout, offsets);
    const bool pack = !u.integers && pays_to_pack(u, layout, false);
    const Buffer packed(CALL(hidden_memory, u, pack, false));
    Prepared prepared;
    CALL(hidden_prepare, &prepared, u, pack, false, packed.get());
    for_parts(layout, u, [&](long first, long some) {
        const Buffer memory(CALL(gru_memory, u, some));
        CALL(gru_run, prepared, from, layout.steps, to, first, some, memory.get());
    });
    return {output, h_n, active};
}

static GruResult gru(Tensor gates, Tensors hidden, MaybeTensor bias_n, Tensor h, MaybeTensor batch_sizes, bool reverse,
                     bool keep) {
    check_shape(h, {-1, -1}, "gru", "h");
    const long size = h.size(1), batch = h.size(0);
    if (!all_float("gru", {&gates, &h}, hidden, {&bias_n}))
        return dispatch<GruResult>("kronecell_reference::gru", "", gates, hidden, bias_n, h, batch_sizes, reverse, keep);
    const Layout layout("gru", gates, batch, batch_sizes, reverse);
    hidden = made_contiguous(hidden), bias_n = made_contiguous(bias_n);
    const HiddenForward with_entries("gru", hidden, 3, size, size, batch);
    return gru_over("gru", gates, layout, with_entries.u, bias_n, h, keep);
}

using Quantized2 = std::tuple<Tensor, Tensor>;

static Quantized2 quantized_gru(Tensor gates, Tensor weight, Tensor scales, int64_t bits, int64_t group, MaybeTensor bias_n,
                                Tensor h, MaybeTensor batch_sizes, bool reverse) {
    const char* op = "quantized_gru";
    check_shape(h, {-1, -1}, op, "h"), check_cpu(weight, op, "weight");
    if (!all_float(op, {&gates, &h, &scales}, {}, {&bias_n}) || !is_readable(weight, scales, bits))
        return dispatch<Quantized2>("kronecell_reference::quantized_gru", "", gates, weight, scales, bits, group, bias_n, h,
                                    batch_sizes, reverse);
    const Layout layout(op, gates, h.size(0), batch_sizes, reverse);
    bias_n = made_contiguous(bias_n), weight = made_contiguous(weight), scales = made_contiguous(scales);
    const Quantized integers = check_quantized(op, weight, scales, bits, group, h.size(1));
    const auto [output, h_n, active] =
        gru_over(op, gates, layout, quantized_hidden(op, integers, 3, h.size(1)), bias_n, h, false);
    return {output, h_n};
}

static GruGradients gru_backward(MaybeTensor d_output, MaybeTensor d_h, MaybeTensor d_active, Tensors hidden, MaybeTensor bias_n,
                                 Tensor h, MaybeTensor batch_sizes, bool reverse, Tensor output, Tensor active, bool weights) {
    const char* op = "gru_backward";
    check_shape(h, {-1, -1}, op, "h");
    const long size = h.size(1), batch = h.size(0);
    const bool all = all_float(op, {&h, &output, &active}, hidden, {&d_output, &d_h, &d_active, &bias_n});
    if (!all || d_active)  // d_active comes from gradients of gradients
        return dispatch<GruGradients>("kronecell_reference::gru_backward", "", d_output, d_h, d_active, hidden, bias_n, h,
                                      batch_sizes, reverse, output, active, weights);
    const Layout layout(op, active, batch, batch_sizes, reverse);
    hidden = made_contiguous(hidden), d_output = made_contiguous(d_output);
    output = made_contiguous(output), active = made_contiguous(active), h = made_contiguous(h);
    const HiddenBackward with_entries(op, hidden, 3, size, size);
    const Hidden& u = with_entries.u;
    check_rows(op, "active", active, active, 4 * size), check_rows(op, "output", output, active, size);
    if (bias_n) check_shape(*bias_n, {size}, op, "bias_n");
    if (d_output) check_rows(op, "d_output", *d_output, active, size);
    if (d_h) check_shape(*d_h, {batch, size}, op, "d_h_n");

    const Tensor d_gates = new_floats(active, rows_by(active, 3 * size)), dh = copy_or_zeros(d_h, h);
    Tensor d_product = new_floats(h, {layout.total, 3 * size});
    const GruBackward to{floats_or_null(d_output), floats(output), floats(active), floats(h), floats_of(d_gates),
                         floats_of(d_product), floats_of(dh)};
    const bool pack = pays_to_pack(u, layout, true);
    const Buffer packed(CALL(hidden_memory, u, pack, true));
    Prepared prepared;
    CALL(hidden_prepare, &prepared, u, pack, true, packed.get());
    for_parts(layout, u, [&](long first, long some) {
        const Buffer memory(CALL(gru_memory, u, some));
        CALL(gru_run_back, prepared, layout.steps, to, first, some, memory.get());
    });
    Tensor d_bias = new_floats(h, {0});
    HiddenGradients d_hidden{new_floats(h, {0}), new_floats(h, {0})};
    if (weights) {
        d_hidden = hidden_gradients(hidden, u, d_product, states_before(layout, output, h));
        if (bias_n) {
            const std::array<int64_t, 1> rows{0};
            d_bias = torch::stable::sum(torch::stable::narrow(d_product, 1, 2 * size, size),
                                        torch::headeronly::IntHeaderOnlyArrayRef(rows));
        }
    }
    return {d_gates, d_hidden.first, d_hidden.second, d_bias, dh};
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("gru(Tensor gates, Tensor[] hidden, Tensor? bias_n, Tensor h, Tensor? batch_sizes, bool reverse, bool keep) -> "
          "(Tensor, Tensor, Tensor)");
    m.def("quantized_gru(Tensor gates, Tensor weight, Tensor scales, int bits, int group, Tensor? bias_n, Tensor h, "
          "Tensor? batch_sizes, bool reverse) -> (Tensor, Tensor)");
    m.def("gru_backward(Tensor? d_output, Tensor? d_h_n, Tensor? d_active, Tensor[] hidden, Tensor? bias_n, Tensor h, "
          "Tensor? batch_sizes, bool reverse, Tensor output, Tensor active, bool weights) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("gru", TORCH_BOX(&gru));
    m.impl("quantized_gru", TORCH_BOX(&quantized_gru));
    m.impl("gru_backward", TORCH_BOX(&gru_backward));
}

}  // namespace kronecell
