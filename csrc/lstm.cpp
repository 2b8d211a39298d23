// lstm: all steps of an LSTM over finished gates, and lstm_backward, its gradients back through time; quantized_lstm: the
// same over U as integers. The schemas and what the arguments mean are in kronecell/ops/recurrence.py and quantized.py.
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
#define KERNEL_FILE "recurrence_lstm.h"
#include "widths.h"

namespace kronecell {

using LstmResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using LstmGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

static void check_states(const char* op, const Tensor& h, const Tensor& c, const MaybeTensor& project) {
    check_shape(h, {-1, -1}, op, "h");
    check_shape(c, {h.size(0), -1}, op, "c");
    if (project)
        check_shape(*project, {h.size(1), c.size(1)}, op, "project");
    else
        check_shape(h, {c.size(0), c.size(1)}, op, "h");
}

static LstmResult lstm_over(const char* op, Tensor gates, const Layout& layout, const Hidden& u, const Tensor& h,
                            const Tensor& c, const MaybeTensor& project, bool keep) {
    const long size = c.size(1), width = h.size(1);
    gates = gates_read(op, gates, u);
    const Tensor output = new_floats(gates, rows_by(gates, width)), h_n = copy_of(h), c_n = copy_of(c);
    const Tensor active = new_floats(gates, keep ? rows_by(gates, 4 * size) : std::vector<int64_t>{0});
    const Tensor cells = new_floats(gates, keep ? rows_by(gates, size) : std::vector<int64_t>{0});
    const LstmForward to{floats_or_null(project), floats_of(output), floats_of(h_n), floats_of(c_n),
                         keep ? floats_of(active) : nullptr, keep ? floats_of(cells) : nullptr};
    std::vector<long> offsets;
    const Gates from = gates_of(gates, layout, offsets);
    const bool pack = !u.integers && pays_to_pack(u, layout, false);
    const Buffer packed(CALL(hidden_memory, u, pack, false));
    Prepared prepared;
    CALL(hidden_prepare, &prepared, u, pack, false, packed.get());
    for_parts(layout, u, [&](long first, long some) {
        const Buffer memory(CALL(lstm_memory, u, some));
        CALL(lstm_run, prepared, from, layout.steps, to, first, some, memory.get());
    });
    return {output, h_n, c_n, active, cells};
}

static LstmResult lstm(Tensor gates, Tensors hidden, Tensor h, Tensor c, MaybeTensor project, MaybeTensor batch_sizes,
                       bool reverse, bool keep) {
    check_states("lstm", h, c, project);
    const long size = c.size(1), width = h.size(1), batch = h.size(0);
    if (!all_float("lstm", {&gates, &h, &c}, hidden, {&project}))
        return dispatch<LstmResult>("kronecell_reference::lstm", "", gates, hidden, h, c, project, batch_sizes, reverse, keep);
    const Layout layout("lstm", gates, batch, batch_sizes, reverse);
    hidden = made_contiguous(hidden), project = made_contiguous(project);
    const HiddenForward with_entries("lstm", hidden, 4, size, width, batch);
    return lstm_over("lstm", gates, layout, with_entries.u, h, c, project, keep);
}

using Quantized3 = std::tuple<Tensor, Tensor, Tensor>;

static Quantized3 quantized_lstm(Tensor gates, Tensor weight, Tensor scales, int64_t bits, int64_t group, Tensor h, Tensor c,
                                 MaybeTensor project, MaybeTensor batch_sizes, bool reverse) {
    const char* op = "quantized_lstm";
    check_states(op, h, c, project), check_cpu(weight, op, "weight");
    if (!all_float(op, {&gates, &h, &c, &scales}, {}, {&project}) || !is_readable(weight, scales, bits))
        return dispatch<Quantized3>("kronecell_reference::quantized_lstm", "", gates, weight, scales, bits, group, h, c, project,
                                    batch_sizes, reverse);
    const Layout layout(op, gates, h.size(0), batch_sizes, reverse);
    project = made_contiguous(project), weight = made_contiguous(weight), scales = made_contiguous(scales);
    const Quantized integers = check_quantized(op, weight, scales, bits, group, h.size(1));
    const auto [output, h_n, c_n, active, cells] =
        lstm_over(op, gates, layout, quantized_hidden(op, integers, 4, c.size(1)), h, c, project, false);
    return {output, h_n, c_n};
}

static LstmGradients lstm_backward(MaybeTensor d_output, MaybeTensor d_h, MaybeTensor d_c, MaybeTensor d_active,
                                   MaybeTensor d_cells, Tensors hidden, Tensor h, Tensor c, MaybeTensor project,
                                   MaybeTensor batch_sizes, bool reverse, Tensor output, Tensor active, Tensor cells,
                                   bool weights) {
    const char* op = "lstm_backward";
    check_states(op, h, c, project);
    const long size = c.size(1), width = h.size(1), batch = h.size(0);
    const bool all = all_float(op, {&h, &c, &output, &active, &cells}, hidden,
                               {&d_output, &d_h, &d_c, &d_active, &d_cells, &project});
    if (!all || d_active || d_cells)  // the last two come from gradients of gradients
        return dispatch<LstmGradients>("kronecell_reference::lstm_backward", "", d_output, d_h, d_c, d_active, d_cells, hidden, h,
                                       c, project, batch_sizes, reverse, output, active, cells, weights);
    const Layout layout(op, active, batch, batch_sizes, reverse);
    hidden = made_contiguous(hidden), project = made_contiguous(project), d_output = made_contiguous(d_output);
    output = made_contiguous(output), active = made_contiguous(active), cells = made_contiguous(cells);
    h = made_contiguous(h), c = made_contiguous(c);
    const HiddenBackward with_entries(op, hidden, 4, size, width);
    const Hidden& u = with_entries.u;
    check_rows(op, "active", active, active, 4 * size), check_rows(op, "cells", cells, active, size);
    check_rows(op, "output", output, active, width);
    if (d_output) check_rows(op, "d_output", *d_output, active, width);
    if (d_h) check_shape(*d_h, {batch, width}, op, "d_h_n");
    if (d_c) check_shape(*d_c, {batch, size}, op, "d_c_n");

    const Tensor d_gates = new_floats(active, rows_by(active, 4 * size)), dh = copy_or_zeros(d_h, h), dc = copy_or_zeros(d_c, c);
    const Tensor ups = new_floats(h, {project ? layout.total : 0, width});
    const LstmBackward to{floats_or_null(d_output), floats(active), floats(cells), floats(c), floats_of(d_gates),
                          floats_of(dh), floats_of(dc), floats_of(ups)};
    const bool pack = pays_to_pack(u, layout, true);
    const Buffer packed(CALL(hidden_memory, u, pack, true)), packed_project(project ? CALL(columns_memory, width, size, pack) : 0);
    Prepared prepared;
    CALL(hidden_prepare, &prepared, u, pack, true, packed.get());
    Columns columns{};
    if (project) columns = CALL(columns_of, floats(*project), size, width, size, pack, packed_project.get());
    for_parts(layout, u, [&](long first, long some) {
        const Buffer memory(CALL(lstm_memory, u, some));
        CALL(lstm_run_back, prepared, project ? &columns : nullptr, layout.steps, to, first, some, memory.get());
    });
    HiddenGradients d_hidden{new_floats(h, {0}), new_floats(h, {0})};
    Tensor d_project = new_floats(h, {0});
    if (weights) {
        const Tensor sums = by_rows(d_gates, layout.total, 4 * size);
        d_hidden = hidden_gradients(hidden, u, sums, states_before(layout, output, h));
        if (project) {
            const Tensor states = new_floats(h, {layout.total, size});  // o tanh(c), before the projection
            CALL(lstm_states, floats(active), floats(cells), floats_of(states), layout.total, size);
            d_project = multiply(torch::stable::transpose(ups, 0, 1), states);
        }
    }
    return {d_gates, d_hidden.first, d_hidden.second, dh, dc, d_project};
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("lstm(Tensor gates, Tensor[] hidden, Tensor h, Tensor c, Tensor? project, Tensor? batch_sizes, bool reverse, "
          "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("quantized_lstm(Tensor gates, Tensor weight, Tensor scales, int bits, int group, Tensor h, Tensor c, Tensor? project, "
          "Tensor? batch_sizes, bool reverse) -> (Tensor, Tensor, Tensor)");
    m.def("lstm_backward(Tensor? d_output, Tensor? d_h_n, Tensor? d_c_n, Tensor? d_active, Tensor? d_cells, Tensor[] hidden, "
          "Tensor h, Tensor c, Tensor? project, Tensor? batch_sizes, bool reverse, Tensor output, Tensor active, Tensor cells, "
          "bool weights) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("lstm", TORCH_BOX(&lstm));
    m.impl("quantized_lstm", TORCH_BOX(&quantized_lstm));
    m.impl("lstm_backward", TORCH_BOX(&lstm_backward));
}

}  // namespace kronecell
