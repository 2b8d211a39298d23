// lstm: all steps of an LSTM over finished gates, and lstm_backward, its gradients back through time. The schemas and what
// the arguments mean are in kronecell/ops/recurrence.py.
#include "recurrence_border.h"

#define KERNEL_FILE "recurrence_gates.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_products.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_hidden.h"
#include "widths.h"
#define KERNEL_FILE "recurrence_lstm.h"
#include "widths.h"

namespace kronecell {

using LstmResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using LstmGradients = std::tuple<Tensor, Tensors, Tensor, Tensor, Tensor>;

static void check_states(const char* op, const Tensor& h, const Tensor& c, const MaybeTensor& project) {
    check_shape(h, {-1, -1}, op, "h");
    check_shape(c, {h.size(0), -1}, op, "c");
    if (project)
        check_shape(*project, {h.size(1), c.size(1)}, op, "project");
    else
        check_shape(h, {c.size(0), c.size(1)}, op, "h");
}

static LstmResult lstm(Tensor gates, Tensors hidden, Tensor h, Tensor c, MaybeTensor project, MaybeTensor batch_sizes,
                       bool reverse, bool keep) {
    check_states("lstm", h, c, project);
    const long size = c.size(1), width = h.size(1), batch = h.size(0);
    if (!all_float("lstm", {&gates, &h, &c}, hidden, {&project}))
        return dispatch<LstmResult>("kronecell_reference::lstm", "", gates, hidden, h, c, project, batch_sizes, reverse, keep);
    const Layout layout("lstm", gates, batch, batch_sizes, reverse);
    check_shape(by_rows_or_self(gates), {-1, 4 * size}, "lstm", "gates");
    hidden = made_contiguous(hidden), project = made_contiguous(project);
    const Hidden u = check_hidden("lstm", hidden, 4, size, width);
    if (gates.stride(gates.dim() - 1) != 1) gates = torch::stable::contiguous(gates);

    const Tensor output = new_floats(gates, rows_by(gates, width));
    const Tensor h_n = torch::stable::clone(made_contiguous(h)), c_n = torch::stable::clone(made_contiguous(c));
    const Tensor active = new_floats(gates, keep ? rows_by(gates, 4 * size) : std::vector<int64_t>{0});
    const Tensor cells = new_floats(gates, keep ? rows_by(gates, size) : std::vector<int64_t>{0});
    const LstmForward to{floats_or_null(project), floats_of(output), floats_of(h_n), floats_of(c_n),
                         keep ? floats_of(active) : nullptr, keep ? floats_of(cells) : nullptr};
    std::vector<long> offsets;
    const Gates from = gates_of(gates, layout, offsets);
    const bool pack = pays_to_pack(u, layout, false);
    const Buffer packed(CALL(hidden_memory, u, pack, false));
    const auto run = [&](auto prepared, auto prepare, auto memory_of, auto step) {
        prepare(&prepared, u, pack, false, packed.get());
        for_parts(layout, u, [&](long first, long some) {
            const Buffer memory(memory_of(u, some));
            step(prepared, from, layout.steps, to, first, some, memory.get());
        });
    };
    (void)run;
    return {output, h_n, c_n, active, cells};
}

}  // namespace kronecell
