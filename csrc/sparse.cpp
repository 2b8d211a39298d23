// sparse_linear: start + x S^T for a sparse S, and its gradients. The schemas and what the arguments mean are in
// kronecell/ops/sparse.py.
#include "sparse.h"

#include "recurrence_border.h"

#define KERNEL_FILE "sparse_kernel.h"
#include "widths.h"
#define KERNEL_FILE "sparse_sums_kernel.h"
#include "widths.h"

namespace kronecell {

static Tensor product(const char* op, const Tensor& x, const Tensor& values, const Tensor& places, long outputs, long inputs,
                      bool back, const MaybeTensor& start) {
    const long rows = x.size(0), columns = back ? inputs : outputs;
    const Sparse entries = check_sparse(op, values, places, outputs, inputs);
    const SlotLayout layout(entries.values, entries.places, entries.count, entries.block, outputs, inputs, register_width(), back);
    const Tensor out = start ? new_floats(x, {rows, columns}) : new_zero_floats(x, {rows, columns});
    if (start) std::copy_n(floats(*start), rows * columns, floats_of(out));
    const float* from = floats(x);
    float* to = floats_of(out);
    const Slots& slots = layout.slots;
    constexpr long together = 64;
    in_parallel((rows + together - 1) / together, rows * entries.count * entries.block, [&](long first, long last) {
        const Buffer memory(slots.memory());
        const long begin = first * together, end = std::min(rows, last * together);
        CALL(add_slots, slots, from + begin * slots.inputs, slots.inputs, to + begin * columns, columns, end - begin, memory.get());
    });
    return out;
}

static Tensor sparse_linear(Tensor x, Tensor values, Tensor places, int64_t outputs, MaybeTensor start) {
    const char* op = "sparse_linear";
    check_shape(x, {-1, -1}, op, "x");
    if (!all_float(op, {&x, &values}, {}, {&start}))
        return dispatch<Tensor>("kronecell_reference::sparse_linear", "", x, values, places, outputs, start);
    x = made_contiguous(x), values = made_contiguous(values), places = made_contiguous(places), start = made_contiguous(start);
    if (start) check_shape(*start, {x.size(0), outputs}, op, "start");
    return product(op, x, values, places, outputs, x.size(1), false, start);
}

static Tensor sparse_back(Tensor upstream, Tensor values, Tensor places, int64_t inputs) {
    const char* op = "sparse_back";
    check_shape(upstream, {-1, -1}, op, "upstream");
    if (!all_float(op, {&upstream, &values}, {}, {}))
        return dispatch<Tensor>("kronecell_reference::sparse_back", "", upstream, values, places, inputs);
    upstream = made_contiguous(upstream), values = made_contiguous(values), places = made_contiguous(places);
    return product(op, upstream, values, places, upstream.size(1), inputs, true, std::nullopt);
}

static Tensor sparse_gradient(Tensor upstream, Tensor x, Tensor places, int64_t block) {
    const char* op = "sparse_gradient";
    check_shape(x, {-1, -1}, op, "x"), check_shape(upstream, {x.size(0), -1}, op, "upstream");
    if (!all_float(op, {&upstream, &x}, {}, {}))
        return dispatch<Tensor>("kronecell_reference::sparse_gradient", "", upstream, x, places, block);
    STD_TORCH_CHECK(block > 0, "kronecell::sparse_gradient: expected a positive block, got ", block);
    upstream = made_contiguous(upstream), x = made_contiguous(x), places = made_contiguous(places);
    const Tensor out = new_zero_floats(x, {places.dim() ? places.size(0) : 0, block});
    const long rows = x.size(0), outputs = upstream.size(1), inputs = x.size(1);
    const Sparse entries = check_sparse(op, out, places, outputs, inputs);
    const Buffer memory(CALL(sampled_memory, outputs, inputs));
    CALL(sampled_sums, floats(upstream), floats(x), entries.places, entries.count, block, outputs, inputs, rows, floats_of(out),
         memory.get());
    return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("sparse_linear(Tensor x, Tensor values, Tensor places, int outputs, Tensor? start) -> Tensor");
    m.def("sparse_back(Tensor upstream, Tensor values, Tensor places, int inputs) -> Tensor");
    m.def("sparse_gradient(Tensor upstream, Tensor x, Tensor places, int block) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("sparse_linear", TORCH_BOX(&sparse_linear));
    m.impl("sparse_back", TORCH_BOX(&sparse_back));
    m.impl("sparse_gradient", TORCH_BOX(&sparse_gradient));
}

}  // namespace kronecell
