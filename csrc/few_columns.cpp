// few_columns: x (rows, depth) times w (columns, depth)^T, and column_sums, the gradient of w. x is float32 or uint8, whose
// numbers are 0 to 255.
#include "matrices.h"

#define KERNEL_FILE "columns_kernel.h"
#include "widths.h"
#define KERNEL_FILE "sums_kernel.h"
#include "widths.h"

namespace kronecell {

// Where our kernels are faster than torch's or than our own packed product, measured on one core with AVX-512 and AVX2
// (benchmarks/results/kernels.md): `elements` of x, `columns` of w.
static bool kernel_pays(bool bytes, long elements, long depth, long columns) {
    const int width = register_width();
    const long least = width == 16 ? 1L << 17 : 1L << 20;
    const long enough = columns > width ? least : least / 4;
    if (columns < 2 || columns > 2 * width || depth < 8 || elements < (depth < 64 ? std::max(enough, 1L << 18) : enough))
        return false;
    // Rows of a multiple of 256 numbers compete for the same lines of the cache.
    return depth < 4096 && (bytes || depth % 256 || depth <= 512 || columns <= 4);
}

static bool gradient_pays(bool bytes, long elements, long depth, long columns) {
    const long enough = columns > register_width() ? 1L << 20 : 1L << 18;
    return depth >= CALL(least_depth) && elements >= enough && kernel_pays(bytes, elements, depth, columns);
}

constexpr long CHUNK = 1L << 18;  // bytes that become numbers at once where no kernel reads them

static Tensor as_floats(const Tensor& x) { return is_byte(x) ? torch::stable::to(x, ScalarType::Float) : x; }

// x @ w^T where the kernel does not pay.
static Tensor by_matrices(const Tensor& x, const Tensor& weight) {
    const Tensor transposed = torch::stable::transpose(weight, 0, 1);
    if (!is_byte(x) || x.numel() <= CHUNK) return multiply(as_floats(x), transposed);
    const long rows = x.size(0), each = std::max(1L, CHUNK / x.size(1));
    Tensor out = new_floats(weight, {rows, weight.size(0)}), from = x;
    for (long r = 0; r < rows; r += each) {
        const long some = std::min(each, rows - r);
        Tensor place = torch::stable::narrow(out, 0, r, some);
        torch::stable::copy_(place, multiply(as_floats(torch::stable::narrow(from, 0, r, some)), transposed));
    }
    return out;
}

static Tensor few_columns_op(Tensor x, Tensor weight) {
    check_shape(weight, {-1, -1}, "few_columns", "weight");
    const long columns = weight.size(0), depth = weight.size(1);
    check_shape(x, {-1, depth}, "few_columns", "x");
    check_cpu(x, "few_columns", "x"), check_cpu(weight, "few_columns", "weight");
    if (!is_float(weight) || !(is_float(x) || is_byte(x)))
        return dispatch<Tensor>("kronecell_reference::few_columns", "", x, weight);
    const bool bytes = is_byte(x);
    const long rows = x.size(0);
    if (!kernel_pays(bytes, x.numel(), depth, columns)) return by_matrices(x, weight);
    x = made_contiguous(x), weight = made_contiguous(weight);
    const Tensor out = new_floats(weight, {rows, columns});
    const char* from = static_cast<const char*>(x.const_data_ptr());
    const float* w = floats(weight);
    float* to = floats_of(out);
    in_parallel(rows, rows * depth * columns, [&](long first, long last) {
        const Buffer memory(CALL(columns_memory, bytes, depth, columns));
        CALL(prepare_columns, w, memory.get(), depth, columns);
        CALL(few_columns, from + first * depth * (bytes ? 1 : sizeof(float)), bytes, memory.get(), to + first * columns,
             last - first, depth, columns, nullptr, 0);
    });
    return out;
}

static Tensor column_sums_op(Tensor x, Tensor upstream) {
    check_shape(upstream, {-1, -1}, "column_sums", "upstream");
    const long rows = upstream.size(0), columns = upstream.size(1);
    check_shape(x, {rows, -1}, "column_sums", "x");
    check_cpu(x, "column_sums", "x"), check_cpu(upstream, "column_sums", "upstream");
    if (!is_float(upstream) || !(is_float(x) || is_byte(x)))
        return dispatch<Tensor>("kronecell_reference::column_sums", "", x, upstream);
    const bool bytes = is_byte(x);
    const long depth = x.size(1), size = columns * depth;
    if (!gradient_pays(bytes, x.numel(), depth, columns)) {
        if (!bytes || x.numel() <= CHUNK) return multiply(torch::stable::transpose(upstream, 0, 1), as_floats(x));
        const Tensor out = new_zero_floats(upstream, {columns, depth});
        Tensor g = upstream;
        for (long r = 0, each = std::max(1L, CHUNK / depth); r < rows; r += each) {
            const Tensor part = as_floats(torch::stable::narrow(x, 0, r, std::min(each, rows - r)));
            Tensor up = torch::stable::narrow(g, 0, r, std::min(each, rows - r));
            const Tensor more = multiply(torch::stable::transpose(up, 0, 1), part);
            float* to = floats_of(out);
            const float* with = floats(more);
            for (long i = 0; i < size; i++) to[i] += with[i];
        }
        return out;
    }
    x = made_contiguous(x), upstream = made_contiguous(upstream);
    const Tensor out = new_zero_floats(upstream, {columns, depth});
    const char* from = static_cast<const char*>(x.const_data_ptr());
    const float* up = floats(upstream);
    float* to = floats_of(out);
    // Each thread but the first sums into memory of its own; added in order, the result is the same in every run.
    const long threads = std::max(1L, std::min<long>(torch::stable::get_num_threads(), rows * size / (1L << 20)));
    const long each = (rows + threads - 1) / threads;
    const Buffer others((threads - 1) * size, true);
    in_parallel(threads, threads == 1 ? 0 : rows * size, [&](long first, long last) {
        for (long t = first; t < last; t++) {
            const long begin = t * each, some = std::min(each, rows - begin);
            if (some <= 0) continue;
            const Buffer memory(CALL(sums_memory, bytes, depth, columns), true);
            CALL(column_sums, from + begin * depth * (bytes ? 1 : sizeof(float)), bytes, up + begin * columns,
                 t ? others.get() + (t - 1) * size : to, memory.get(), some, depth, columns);
        }
    });
    for (long t = 1; t < threads; t++)
        for (long i = 0; i < size; i++) to[i] += others.get()[(t - 1) * size + i];
    return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("few_columns(Tensor x, Tensor weight) -> Tensor");
    m.def("column_sums(Tensor x, Tensor upstream) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("few_columns", TORCH_BOX(&few_columns_op));
    m.impl("column_sums", TORCH_BOX(&column_sums_op));
}

}  // namespace kronecell
