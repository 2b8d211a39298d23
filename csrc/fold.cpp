// fold: the first two products of KCP in one operator, and the gradients of their small operands; see fold_kernel.h.
#include "tensors.h"

#define KERNEL_FILE "columns_kernel.h"
#include "widths.h"
#define KERNEL_FILE "sums_kernel.h"
#include "widths.h"
#define KERNEL_FILE "fold_kernel.h"
#include "widths.h"

namespace kronecell {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Two = std::tuple<Tensor, Tensor>;

// Checks what two operators share; the number of `others` comes from the factors.
static FoldSizes sizes_of(const Tensor& weight, const Tensor& factors, int64_t places, int64_t shared, int64_t inner,
                          const char* op) {
    check_shape(weight, {-1, -1}, op, "weight");
    STD_TORCH_CHECK(places > 0 && shared > 0 && inner > 0, "kronecell::", op,
                    ": expected places, shared and inner of at least 1, got ", places, ", ", shared, " and ", inner);
    check_shape(factors, {-1, places}, op, "factors");
    STD_TORCH_CHECK(factors.size(0) % shared == 0, "kronecell::", op, ": ", factors.size(0),
                    " lines of factors cannot be divided among ", shared, " groups of columns");
    STD_TORCH_CHECK(weight.size(0) % (shared * inner) == 0, "kronecell::", op, ": ", weight.size(0),
                    " columns cannot be (any, ", shared, ", ", inner, ")");
    check_cpu(weight, op, "weight"), check_cpu(factors, op, "factors");
    return {0, places, weight.size(1), weight.size(0), shared, inner, factors.size(0) / shared};
}

// What the kernel can take: its tables are for two registers of columns, and it needs something to sum.
static bool fits(const FoldSizes& n) {
    return n.columns > 0 && n.columns <= 2 * register_width() && n.depth > 0 && n.others > 0;
}

// v is computed with y if it has at most a quarter of the numbers of x, and rows are no shorter than the widest tile.
static bool keeps_v(const FoldSizes& n) { return 4 * n.shared * n.others <= n.places && n.depth >= 96; }

static Three fold_op(Tensor x, Tensor weight, Tensor factors, int64_t places, int64_t shared, int64_t inner, bool keep) {
    FoldSizes n = sizes_of(weight, factors, places, shared, inner, "fold");
    check_shape(x, {-1, places * n.depth}, "fold", "x");
    check_cpu(x, "fold", "x");
    const bool bytes = is_byte(x);
    if (!is_float(weight) || !is_float(factors) || !(is_float(x) || bytes) || !fits(n))
        return dispatch<Three>("kronecell_reference::fold", "", x, weight, factors, places, shared, inner, keep);
    x = made_contiguous(x), weight = made_contiguous(weight), factors = made_contiguous(factors);
    n.rows = x.size(0);
    const bool with_v = keep && !bytes && keeps_v(n);
    const Tensor z = new_floats(weight, {n.rows, n.others * n.columns});
    const Tensor y = keep ? new_floats(weight, {n.rows * places, n.columns}) : new_floats(weight, {0});
    const Tensor v = with_v ? new_floats(weight, {n.rows, shared * n.others, n.depth}) : new_floats(weight, {0});
    const char* from = static_cast<const char*>(x.const_data_ptr());
    const float *w = floats(weight), *f = floats(factors);
    float *to_z = floats_of(z), *to_y = keep ? floats_of(y) : nullptr, *to_v = with_v ? floats_of(v) : nullptr;
    in_parallel(n.rows, x.numel() * n.columns, [&](long first, long last) {
        FoldSizes part = n;
        part.rows = last - first;
        const Buffer memory(CALL(fold_memory, bytes, keep, with_v, part), true);
        CALL(fold, from + first * places * n.depth * (bytes ? 1 : sizeof(float)), bytes, w, f,
             to_y ? to_y + first * places * n.columns : to_y, to_z + first * n.others * n.columns,
             to_v ? to_v + first * shared * n.others * n.depth : to_v, memory.get(), part);
    });
    return {z, y, v};
}

static Two fold_backward_op(Tensor upstream, Tensor y, Tensor v, Tensor weight, Tensor factors, int64_t places,
                            int64_t shared, int64_t inner) {
    FoldSizes n = sizes_of(weight, factors, places, shared, inner, "fold_backward");
    check_shape(upstream, {-1, n.others * n.columns}, "fold_backward", "upstream");
    n.rows = upstream.size(0);
    check_shape(y, {n.rows * places, n.columns}, "fold_backward", "y");
    check_shape(v, {n.rows, shared * n.others, n.depth}, "fold_backward", "v");
    check_cpu(upstream, "fold_backward", "upstream"), check_cpu(y, "fold_backward", "y");
    check_cpu(v, "fold_backward", "v");
    const bool suits = is_float(upstream) && is_float(y) && is_float(v) && is_float(weight) && is_float(factors) && fits(n);
    if (!suits || n.depth < CALL(least_depth))
        return dispatch<Two>("kronecell_reference::fold_backward", "", upstream, y, v, weight, factors, places, shared, inner);
    upstream = made_contiguous(upstream), y = made_contiguous(y), v = made_contiguous(v);
    const Tensor of_weight = new_zero_floats(weight, {n.columns, n.depth});
    const Tensor of_factors = new_zero_floats(factors, {shared * n.others, places});
    const Buffer memory(CALL(fold_gradients_memory, n), true);
    // By one thread: it takes a tenth of the time of the forward product.
    CALL(fold_gradients, floats(y), floats(v), floats(upstream), floats_of(of_weight), floats_of(of_factors), memory.get(), n);
    return {of_weight, of_factors};
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("fold(Tensor x, Tensor weight, Tensor factors, int places, int shared, int inner, bool keep)"
          " -> (Tensor, Tensor, Tensor)");
    m.def("fold_backward(Tensor upstream, Tensor y, Tensor v, Tensor weight, Tensor factors, int places, int shared,"
          " int inner) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("fold", TORCH_BOX(&fold_op));
    m.impl("fold_backward", TORCH_BOX(&fold_backward_op));
}

}  // namespace kronecell
