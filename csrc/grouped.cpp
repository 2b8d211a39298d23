// grouped: y[r, g * n + j] = bias[g * n + j] + sum over k of a[g, r, k] w[g, k, j], and its gradients; see grouped_kernel.h.
#include "tensors.h"

#define KERNEL_FILE "matrices_kernel.h"
#include "widths.h"
#define KERNEL_FILE "grouped_kernel.h"
#include "widths.h"

namespace kronecell {

using Three = std::tuple<Tensor, Tensor, Tensor>;

static Tensor grouped_op(Tensor a, Tensor weight, std::optional<Tensor> bias) {
    check_shape(a, {-1, -1, -1}, "grouped", "a");
    const long groups = a.size(0), rows = a.size(1), depth = a.size(2);
    check_shape(weight, {groups, depth, -1}, "grouped", "weight");
    const long columns = weight.size(2);
    if (bias) check_shape(*bias, {groups * columns}, "grouped", "bias");
    check_cpu(a, "grouped", "a"), check_cpu(weight, "grouped", "weight");
    if (bias) check_cpu(*bias, "grouped", "bias");
    if (!is_float(a) || !is_float(weight) || (bias && !is_float(*bias)))
        return dispatch<Tensor>("kronecell_reference::grouped", "", a, weight, bias);
    weight = made_contiguous(weight);
    if (bias) bias = made_contiguous(*bias);
    const Tensor out = new_floats(a, {rows, groups * columns});
    const float *from = floats(a), *w = floats(weight), *start = bias ? floats(*bias) : nullptr;
    const long group = a.stride(0), row = a.stride(1), next = a.stride(2), out_row = groups * columns;
    float* to = floats_of(out);
    in_parallel(rows, rows * depth * out_row, [&](long first, long last) {
        const Buffer memory(CALL(grouped_memory, depth, columns));
        for (long g = 0; g < groups; g++)
            CALL(grouped, Operand{from + g * group + first * row, row, next}, w + g * depth * columns,
                 start ? start + g * columns : start, to + first * out_row + g * columns, out_row, memory.get(), last - first,
                 depth, columns);
    });
    return out;
}

static Three grouped_backward_op(Tensor upstream, Tensor a, Tensor weight, std::vector<bool> wanted) {
    check_shape(a, {-1, -1, -1}, "grouped_backward", "a");
    const long groups = a.size(0), rows = a.size(1), depth = a.size(2);
    check_shape(weight, {groups, depth, -1}, "grouped_backward", "weight");
    const long columns = weight.size(2), up_row = groups * columns;
    check_shape(upstream, {rows, up_row}, "grouped_backward", "upstream");
    STD_TORCH_CHECK(wanted.size() == 3, "kronecell::grouped_backward: expected three of `wanted`, got ", wanted.size());
    check_cpu(upstream, "grouped_backward", "upstream"), check_cpu(a, "grouped_backward", "a");
    check_cpu(weight, "grouped_backward", "weight");
    if (!is_float(a) || !is_float(weight) || !is_float(upstream)) {
        const bool three[] = {wanted[0], wanted[1], wanted[2]};
        return dispatch<Three>("kronecell_reference::grouped_backward", "", upstream, a, weight,
                               torch::headeronly::HeaderOnlyArrayRef<bool>(three, 3));
    }
    upstream = made_contiguous(upstream), weight = made_contiguous(weight);
    const auto none = [&] { return new_floats(a, {0}); };  // each its own: results share no memory
    // As a lies; where that has gaps or its rows are not in one piece, computed beside and copied.
    Tensor of_a = wanted[0] ? torch::stable::empty_like(a) : none(), beside = of_a;
    if (wanted[0] && of_a.stride(2) != 1 && depth > 1) beside = new_floats(a, {groups, rows, depth});
    const Tensor of_weight = wanted[1] ? new_zero_floats(a, {groups, depth, columns}) : none();
    const Tensor of_bias = wanted[2] ? new_zero_floats(a, {up_row}) : none();
    const float *from = floats(a), *w = floats(weight), *up = floats(upstream);
    const long group = a.stride(0), row = a.stride(1), next = a.stride(2);
    const long of_group = wanted[0] ? beside.stride(0) : 0, of_row = wanted[0] ? beside.stride(1) : 0;
    float* to_a = wanted[0] ? floats_of(beside) : nullptr;
    float* to_weight = wanted[1] ? floats_of(of_weight) : nullptr;
    float* to_bias = wanted[2] ? floats_of(of_bias) : nullptr;
    in_parallel(groups, rows * depth * up_row, [&](long first, long last) {
        const Buffer memory(CALL(grouped_gradients_memory, depth, columns));
        for (long g = first; g < last; g++)
            CALL(grouped_gradients, Operand{from + g * group, row, next}, w + g * depth * columns, up + g * columns, up_row,
                 to_a ? to_a + g * of_group : to_a, of_row, to_weight ? to_weight + g * depth * columns : to_weight,
                 to_bias ? to_bias + g * columns : to_bias, memory.get(), rows, depth, columns);
    });
    if (wanted[0] && beside.get() != of_a.get()) torch::stable::copy_(of_a, beside);
    return {of_a, of_weight, of_bias};
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("grouped(Tensor a, Tensor weight, Tensor? bias) -> Tensor");
    m.def("grouped_backward(Tensor upstream, Tensor a, Tensor weight, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("grouped", TORCH_BOX(&grouped_op));
    m.impl("grouped_backward", TORCH_BOX(&grouped_backward_op));
}

}  // namespace kronecell
