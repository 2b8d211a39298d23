// sparse_linear: start + x S^T for a sparse S, and its gradients. The schemas and what the arguments mean are in
// kronecell/ops/sparse.py.
#include "recurrence_border.h"
#include "sparse_border.h"

#define KERNEL_FILE "sparse_kernel.h"
#include "widths.h"
#define KERNEL_FILE "sparse_sums_kernel.h"
#include "widths.h"

namespace kronecell {

// Rows in parts on the threads that are worth it; f(first row, how many, memory).
template <class F>
static void for_rows(const Sparse& sparse, long rows, const F& f) {
    constexpr long together = 64;
    in_parallel((rows + together - 1) / together, rows * sparse.count * sparse.block, [&](long first, long last) {
        const long begin = first * together, some = std::min(rows, last * together) - begin;
        const Buffer memory(sparse.memory(some));
        f(begin, some, memory.get());
    });
}

static Tensor sparse_linear(Tensor x, Tensor values, Tensor places, int64_t outputs, MaybeTensor start, MaybeTensor prepared) {
    const char* op = "sparse_linear";
    check_shape(x, {-1, -1}, op, "x");
    if (!all_float(op, {&x, &values}, {}, {&start}))
        return dispatch<Tensor>("kronecell_reference::sparse_linear", "", x, values, places, outputs, start, prepared);
    x = made_contiguous(x), values = made_contiguous(values), places = made_contiguous(places), start = made_contiguous(start);
    const long rows = x.size(0), inputs = x.size(1);
    if (start) check_shape(*start, {rows, outputs}, op, "start");
    const SparseForward forward(op, values, places, prepared, outputs, inputs, rows);
    const Tensor out = start ? new_floats(x, {rows, outputs}) : new_zero_floats(x, {rows, outputs});
    if (start) std::copy_n(floats(*start), rows * outputs, floats_of(out));
    for_rows(forward.sparse, rows, [&](long first, long some, float* memory) {
        CALL(add_sparse, forward.sparse, floats(x) + first * inputs, inputs, floats_of(out) + first * outputs, outputs, some, memory);
    });
    return out;
}

static Tensor sparse_back(Tensor upstream, Tensor values, Tensor places, int64_t inputs) {
    const char* op = "sparse_back";
    check_shape(upstream, {-1, -1}, op, "upstream");
    if (!all_float(op, {&upstream, &values}, {}, {}))
        return dispatch<Tensor>("kronecell_reference::sparse_back", "", upstream, values, places, inputs);
    upstream = made_contiguous(upstream), values = made_contiguous(values), places = made_contiguous(places);
    const long rows = upstream.size(0), outputs = upstream.size(1);
    const SparseBack back(op, values, places, outputs, inputs);
    const Tensor out = new_zero_floats(upstream, {rows, inputs});
    for_rows(back.sparse, rows, [&](long first, long some, float* memory) {
        CALL(add_sparse, back.sparse, floats(upstream) + first * outputs, outputs, floats_of(out) + first * inputs, inputs, some,
             memory);
    });
    return out;
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
    std::vector<long> starts;
    const Sparse entries = check_sparse(op, out, places, outputs, inputs, starts);
    const Buffer memory(CALL(sampled_memory, outputs, inputs));
    CALL(sampled_sums, floats(upstream), floats(x), entries.places, entries.count, block, outputs, inputs, rows, floats_of(out),
         memory.get());
    return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("sparse_linear(Tensor x, Tensor values, Tensor places, int outputs, Tensor? start, Tensor? prepared=None) -> Tensor");
    m.def("sparse_back(Tensor upstream, Tensor values, Tensor places, int inputs) -> Tensor");
    m.def("sparse_gradient(Tensor upstream, Tensor x, Tensor places, int block) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("sparse_linear", TORCH_BOX(&sparse_linear));
    m.impl("sparse_back", TORCH_BOX(&sparse_back));
    m.impl("sparse_gradient", TORCH_BOX(&sparse_gradient));
}

}  // namespace kronecell
