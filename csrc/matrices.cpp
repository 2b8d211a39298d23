// bmm: products of matrices by torch, or by our own kernel where torch's library leaves half of the processor idle.
#include "matrices.h"

#define KERNEL_FILE "matrices_kernel.h"
#include "widths.h"

namespace kronecell {

// torch's library on x86-64 is Intel's, which fills half of a register on AMD processors with AVX-512: there our kernel
// makes more than twice as many multiply-adds a second.
static bool half_blas() {
#if defined(__x86_64__)
    static const bool amd = __builtin_cpu_is("amd");
    return amd && register_width() == 16;
#else
    return false;
#endif
}

// With fewer, what is packed is used too seldom, or most of a register is empty.
static bool pays(long batch, long rows, long depth, long columns) {
    return rows >= 8 && columns >= 8 && batch * rows * depth * columns >= 1L << 16 && half_blas();
}

Tensor multiply(const Tensor& a, const Tensor& b) {
    const bool batched = a.dim() == 3;
    const long batch = batched ? a.size(0) : 1, rows = a.size(-2 + a.dim()), depth = a.size(a.dim() - 1);
    const long columns = b.size(b.dim() - 1);
    if (!pays(batch, rows, depth, columns)) return dispatch<Tensor>(batched ? "aten::bmm" : "aten::mm", "", a, b);
    const Tensor out = batched ? new_floats(a, {batch, rows, columns}) : new_floats(a, {rows, columns});
    const long d = batched ? 1 : 0, a_next = batched ? a.stride(0) : 0, b_next = batched ? b.stride(0) : 0;
    const Operand x{floats(a), a.stride(d), a.stride(d + 1)};
    const float* w = floats(b);
    const long b_row = b.stride(d), b_column = b.stride(d + 1);
    float* to = floats_of(out);
    // Rows of all matrices are divided; a part may be of several matrices.
    in_parallel(batch * rows, batch * rows * depth * columns, [&](long first, long last) {
        const Buffer memory(CALL(matrix_memory, depth, columns));
        for (long r = first; r < last;) {
            const long n = r / rows, i = r % rows, some = std::min(rows - i, last - r);
            CALL(matrix_product, Operand{x.at + n * a_next + i * x.row, x.row, x.next}, w + n * b_next, b_row, b_column,
                 Result{to + r * columns, columns, nullptr, 0}, memory.get(), some, depth, columns);
            r += some;
        }
    });
    return out;
}

static Tensor bmm(Tensor a, Tensor b) {
    STD_TORCH_CHECK((a.dim() == 2 || a.dim() == 3) && b.dim() == a.dim(),
                    "kronecell::bmm: expected two matrices or two batches of them, got ", shape_of(a), " and ", shape_of(b));
    const long d = a.dim();
    STD_TORCH_CHECK(a.size(d - 1) == b.size(d - 2) && (d == 2 || a.size(0) == b.size(0)),
                    "kronecell::bmm: shapes do not fit: ", shape_of(a), " and ", shape_of(b));
    check_cpu(a, "bmm", "a"), check_cpu(b, "bmm", "b");
    if (!is_float(a) || !is_float(b)) return dispatch<Tensor>("kronecell_reference::bmm", "", a, b);
    return multiply(a, b);
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) { m.def("bmm(Tensor a, Tensor b) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) { m.impl("bmm", TORCH_BOX(&bmm)); }

}  // namespace kronecell
