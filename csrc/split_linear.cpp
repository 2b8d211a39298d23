// split_linear: x W + b for few rows and a W that is given as `hidden` of a recurrence. One call, because for one row of a stream
// starting a product costs more than the product.
#include "recurrence_border.h"

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

namespace kronecell {

static Tensor split_linear(Tensor x, Tensors weight, int64_t gates, MaybeTensor bias) {
    const char* op = "split_linear";
    check_shape(x, {-1, -1}, op, "x");
    STD_TORCH_CHECK(gates > 0 && !weight.empty(), "kronecell::split_linear: expected at least one gate, and [W] or [In, Out]");
    if (!all_float(op, {&x}, weight, {&bias}))
        return dispatch<Tensor>("kronecell_reference::split_linear", "", x, weight, gates, bias);
    const Tensor& last = weight[weight.size() > 1];
    const bool by_gate = weight.size() > 1 && last.dim() == 3;
    STD_TORCH_CHECK(last.dim() > 0, "kronecell::split_linear: expected matrices, got a number");
    const long columns = weight.size() == 1 ? last.size(0) : by_gate ? gates * last.size(2) : last.size(last.dim() - 1);
    STD_TORCH_CHECK(columns % gates == 0, "kronecell::split_linear: expected a multiple of ", gates, " columns, got ", columns);
    x = made_contiguous(x), weight = made_contiguous(weight), bias = made_contiguous(bias);
    const long rows = x.size(0);
    const HiddenForward with_entries(op, weight, gates, columns / gates, x.size(1), rows);
    const Hidden& w = with_entries.u;
    if (bias) check_shape(*bias, {columns}, op, "bias");
    const Tensor out = new_floats(x, {rows, columns});
    const Buffer packed(CALL(hidden_memory, w, false, false)), between(w.between(rows));
    Prepared prepared;
    CALL(hidden_prepare, &prepared, w, false, false, packed.get());
    CALL(linear_rows, prepared, floats(x), floats_or_null(bias), between.get(), floats_of(out), rows);
    return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("split_linear(Tensor x, Tensor[] weight, int gates, Tensor? bias) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) { m.impl("split_linear", TORCH_BOX(&split_linear)); }

}  // namespace kronecell
