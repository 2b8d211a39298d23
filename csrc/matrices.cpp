// bmm: products of matrices by torch, or by our own kernel where torch's library leaves half of the processor idle.
#include "matrices.h"

#include <optional>

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

// Our kernel: out = a b, or `start` + a b with the same start for all rows.
static void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b, const float* start = nullptr) {
    const bool batched = a.dim() == 3;
    const long batch = batched ? a.size(0) : 1, rows = a.size(-2 + a.dim()), depth = a.size(a.dim() - 1);
    const long columns = b.size(b.dim() - 1);
    const long d = batched ? 1 : 0, a_next = batched ? a.stride(0) : 0, b_next = batched ? b.stride(0) : 0;
    const long out_row = out.stride(d), out_next = batched ? out.stride(0) : 0;
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
                 Result{to + n * out_next + i * out_row, out_row, start, 0},
                 memory.get(), some, depth, columns);
            r += some;
        }
    });
}

static bool pays(const Tensor& a, const Tensor& b) {
    return pays(a.dim() == 3 ? a.size(0) : 1, a.size(-2 + a.dim()), a.size(a.dim() - 1), b.size(b.dim() - 1));
}

Tensor multiply(const Tensor& a, const Tensor& b) {
    const bool batched = a.dim() == 3;
    if (!pays(a, b)) return dispatch<Tensor>(batched ? "aten::bmm" : "aten::mm", "", a, b);
    const long rows = a.size(-2 + a.dim()), columns = b.size(b.dim() - 1);
    const Tensor out = batched ? new_floats(a, {a.size(0), rows, columns}) : new_floats(a, {rows, columns});
    multiply_into(out, a, b);
    return out;
}

static void check_factors(const char* op, const Tensor& a, const Tensor& b) {
    STD_TORCH_CHECK((a.dim() == 2 || a.dim() == 3) && b.dim() == a.dim(),
                    "kronecell::", op, ": expected two matrices or two batches of them, got ", shape_of(a), " and ",
                    shape_of(b));
    const long d = a.dim();
    STD_TORCH_CHECK(a.size(d - 1) == b.size(d - 2) && (d == 2 || a.size(0) == b.size(0)),
                    "kronecell::", op, ": shapes do not fit: ", shape_of(a), " and ", shape_of(b));
    check_cpu(a, op, "a"), check_cpu(b, op, "b");
}

static Tensor bmm(Tensor a, Tensor b) {
    check_factors("bmm", a, b);
    if (!is_float(a) || !is_float(b)) return dispatch<Tensor>("kronecell_reference::bmm", "", a, b);
    return multiply(a, b);
}

// The same into memory that is there: rows may be farther apart than they are long, numbers of a row may not.
static void bmm_out(Tensor out, Tensor a, Tensor b) {
    const char* op = "bmm_out";
    check_factors(op, a, b), check_cpu(out, op, "out");
    const long d = a.dim();
    STD_TORCH_CHECK(out.dim() == d && out.size(d - 2) == a.size(d - 2) && out.size(d - 1) == b.size(d - 1) &&
                        (d == 2 || out.size(0) == a.size(0)),
                    "kronecell::bmm_out: expected out of the shape of the product, got ", shape_of(out), " for ", shape_of(a),
                    " and ", shape_of(b));
    const bool lies = out.stride(d - 1) == 1 && out.stride(d - 2) >= out.size(d - 1);
    if (is_float(a) && is_float(b) && is_float(out) && lies && pays(a, b))
        multiply_into(out, a, b);
    else
        torch::stable::copy_(out, bmm(a, b));
}

static Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
    const char* op = "linear";
    check_shape(weight, {-1, -1}, op, "weight"), check_shape(x, {-1, weight.size(1)}, op, "x");
    if (bias) check_shape(*bias, {weight.size(0)}, op, "bias");
    check_cpu(x, op, "x"), check_cpu(weight, op, "weight");
    const Tensor transposed = torch::stable::transpose(weight, 0, 1);
    if (is_float(x) && is_float(weight) && (!bias || is_float(*bias)) && pays(x, transposed)) {
        const Tensor out = new_floats(x, {x.size(0), weight.size(0)});
        if (bias) bias = made_contiguous(*bias);
        multiply_into(out, x, transposed, bias ? floats(*bias) : nullptr);
        return out;
    }
    return dispatch<Tensor>("aten::linear", "", x, weight, bias);
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("bmm(Tensor a, Tensor b) -> Tensor");
    m.def("bmm_out(Tensor(a!) out, Tensor a, Tensor b) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("linear", TORCH_BOX(&linear));
    m.impl("bmm", TORCH_BOX(&bmm));
    m.impl("bmm_out", TORCH_BOX(&bmm_out));
}

}  // namespace kronecell
