// What both recurrences check of their arguments, and the gradients of U.
#pragma once

#include <optional>

#include "buffer.h"
#include "matrices.h"
#include "recurrence.h"
#include "sparse_border.h"
#include "width.h"

namespace kronecell {

using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

inline const float* floats_or_null(const MaybeTensor& tensor) { return tensor ? floats(*tensor) : nullptr; }
inline MaybeTensor made_contiguous(const MaybeTensor& tensor) {
    return tensor ? MaybeTensor(made_contiguous(*tensor)) : tensor;
}
inline Tensors made_contiguous(Tensors tensors) {
    for (Tensor& tensor : tensors) tensor = made_contiguous(tensor);
    return tensors;
}

// Whether the kernels can read all of them; an error if they are not all on the CPU.
inline bool all_float(const char* op, std::initializer_list<const Tensor*> tensors, const Tensors& hidden,
                      std::initializer_list<const MaybeTensor*> maybe) {
    bool all = true;
    auto look = [&](const Tensor& tensor) { check_cpu(tensor, op, "all tensors"), all = all && is_float(tensor); };
    for (const Tensor* tensor : tensors) look(*tensor);
    for (std::size_t i = 0; i < hidden.size() && i < 3; i++) look(hidden[i]);  // then come places
    for (const MaybeTensor* tensor : maybe)
        if (*tensor) look(**tensor);
    return all;
}

// `hidden` must be contiguous.
inline Hidden check_hidden(const char* op, const Tensors& hidden, long gates, long size, long width) {
    STD_TORCH_CHECK(hidden.size() == 1 || hidden.size() == 2 || hidden.size() == 4 || hidden.size() == 5, "kronecell::", op,
                    ": expected hidden to be [U], [In, Out] or [In, Out, values, places] and what is prepared of them, got ",
                    hidden.size(), " tensors");
    if (hidden.size() == 1) {
        check_shape(hidden[0], {gates * size, width}, op, "U");
        return Hidden{gates, size, width, 0, false, floats(hidden[0]), nullptr};
    }
    const bool by_gate = hidden[1].dim() == 3;
    const long rank = hidden[1].dim() >= 2 ? hidden[1].size(by_gate ? 1 : 0) : -1;
    if (by_gate)
        check_shape(hidden[1], {gates, -1, size}, op, "Out");
    else
        check_shape(hidden[1], {-1, gates * size}, op, "Out");
    check_shape(hidden[0], {by_gate ? gates * rank : rank, width}, op, "In");
    STD_TORCH_CHECK(rank > 0, "kronecell::", op, ": expected In and Out of rank 1 or more");
    return Hidden{gates, size, width, rank, by_gate, floats(hidden[0]), floats(hidden[1])};
}

// The same with a sparse part, for a forward of `rows` rows a step, or for a backward.
struct HiddenForward {
    std::optional<SparseForward> sparse;
    Hidden u;
    HiddenForward(const char* op, const Tensors& hidden, long gates, long size, long width, long rows)
        : u(check_hidden(op, hidden, gates, size, width)) {
        if (hidden.size() < 4) return;
        const MaybeTensor prepared = hidden.size() > 4 ? MaybeTensor(hidden[4]) : std::nullopt;
        sparse.emplace(op, hidden[2], hidden[3], prepared, u.columns(), width, rows);
        u.sparse = sparse->sparse;
    }
};
struct HiddenBackward {
    std::optional<SparseBack> sparse;
    Hidden u;
    HiddenBackward(const char* op, const Tensors& hidden, long gates, long size, long width)
        : u(check_hidden(op, hidden, gates, size, width)) {
        if (hidden.size() < 4) return;
        sparse.emplace(op, hidden[2], hidden[3], u.columns(), width);
        u.sparse = sparse->sparse;
    }
};

// The steps, with memory for what they point to.
struct Layout {
    std::vector<long> first, rows;
    long total = 0;
    Steps steps{};

    // `shape` is (T, B, ...) or, with batch_sizes, (rows, ...).
    Layout(const char* op, const Tensor& shape, long batch, const MaybeTensor& batch_sizes, bool reverse) {
        const long dim = batch_sizes ? 2 : 3;
        STD_TORCH_CHECK(shape.dim() == dim, "kronecell::", op, ": expected gates of ", dim, " dimensions ",
                        batch_sizes ? "beside batch_sizes" : "without batch_sizes", ", got shape ", shape_of(shape));
        if (batch_sizes) {
            const Tensor& sizes = *batch_sizes;
            STD_TORCH_CHECK(sizes.is_cpu() && sizes.dim() == 1 && sizes.scalar_type() == ScalarType::Long, "kronecell::", op,
                            ": expected batch_sizes to be int64 numbers on the CPU");
            const int64_t* at = static_cast<const int64_t*>(sizes.const_data_ptr());
            const long count = sizes.size(0), stride = count ? sizes.stride(0) : 0;
            for (long t = 0, most = batch; t < count; t++) {
                const long now = at[t * stride];
                STD_TORCH_CHECK(now > 0 && now <= most && (t || now == batch), "kronecell::", op,
                                ": expected batch_sizes to begin with the batch, ", batch, ", and not to grow, got ", now,
                                " at step ", t);
                add(now);
                most = now;
            }
        } else {
            check_shape(shape, {-1, batch, -1}, op, "gates");
            first.reserve(shape.size(0)), rows.reserve(shape.size(0));
            for (long t = 0; t < shape.size(0); t++) add(batch);
        }
        STD_TORCH_CHECK(!batch_sizes || total == shape.size(0), "kronecell::", op, ": batch_sizes add up to ", total,
                        " rows, but gates has ", shape.size(0));
        steps = Steps{static_cast<long>(rows.size()), batch, reverse, first.data(), rows.data()};
    }
    Layout(const Layout&) = delete;

    void add(long some) {
        first.push_back(total), rows.push_back(some);
        total += some;
    }
};

// Of one row, whatever the strides of time and batch; `offsets` holds what it points to.
inline Gates gates_of(const Tensor& gates, const Layout& layout, std::vector<long>& offsets) {
    const bool packed = gates.dim() == 2;
    const long row = gates.stride(packed ? 0 : 1);
    offsets.resize(layout.steps.count);
    for (long t = 0; t < layout.steps.count; t++)
        offsets[t] = packed ? layout.first[t] * row : t * gates.stride(0);
    return Gates{floats(gates), offsets.data(), row};
}

inline std::vector<int64_t> rows_by(const Tensor& gates, long columns) {
    if (gates.dim() == 2) return {gates.size(0), columns};
    return {gates.size(0), gates.size(1), columns};
}

// Numbers of a row must lie together; steps and rows of the batch may lie anywhere.
inline Tensor gates_read(const char* op, const Tensor& gates, const Hidden& u) {
    const long last = gates.dim() - 1;
    STD_TORCH_CHECK(gates.size(last) == u.columns(), "kronecell::", op, ": expected gates of ", u.columns(),
                    " columns, got shape ", shape_of(gates));
    return gates.stride(last) == 1 ? gates : torch::stable::contiguous(gates);
}

// Rows of the same steps as another tensor.
inline void check_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& like, long columns) {
    if (like.dim() == 2)
        check_shape(tensor, {like.size(0), columns}, op, name);
    else
        check_shape(tensor, {like.size(0), like.size(1), columns}, op, name);
}

inline Tensor copy_of(const Tensor& tensor) {
    Tensor copy = new_floats(tensor, {tensor.size(0), tensor.size(1)});
    if (!tensor.is_contiguous()) return torch::stable::copy_(copy, tensor);
    std::copy_n(floats(tensor), tensor.numel(), floats_of(copy));
    return copy;
}
inline Tensor copy_or_zeros(const MaybeTensor& tensor, const Tensor& like) {
    return tensor ? copy_of(*tensor) : new_zero_floats(like, {like.size(0), like.size(1)});
}

inline Tensor by_rows(const Tensor& tensor, long rows, long columns) {
    const std::array<int64_t, 2> shape{rows, columns};
    return torch::stable::view(tensor, shape);
}

// Parts of the batch on the threads that are worth it; f(first, some rows).
template <class F>
void for_parts(const Layout& layout, const Hidden& u, const F& f) {
    constexpr long rows_of_a_thread = 4;  // at least: each thread reads all of U
    const long batch = layout.steps.batch;
    if (!batch) return;
    const long each = u.rank ? u.narrow() * u.width + u.rank * u.columns() : u.columns() * u.width;
    const long work = layout.total * each;
    long parts = std::max(1L, std::min<long>({torch::stable::get_num_threads(), batch / rows_of_a_thread, work >> 20}));
    parts *= (batch + PART_ROWS * parts - 1) / (PART_ROWS * parts);
    const long rows = (batch + parts - 1) / parts;
    in_parallel(parts, work, [&](long first, long last) {
        for (long part = first; part < last; part++)
            if (part * rows < batch) f(part * rows, std::min(rows, batch - part * rows));
    });
}

// Whether what is read at every step is packed first; a dense U by the number of steps alone.
inline bool pays_to_pack(const Hidden& u, const Layout& layout, bool back) {
    const long blocks = (std::min(layout.steps.batch, PART_ROWS) + 11) / 12;
    return u.rank || back ? layout.steps.count > 1 && layout.steps.count * blocks >= PACKED_STEPS
                          : layout.steps.count >= PACKED_STEPS;
}

// The states before all rows, in the order of the input.
Tensor states_before(const Layout& layout, const Tensor& output, const Tensor& h);

// Of U and nothing, or of In and Out.
using HiddenGradients = std::pair<Tensor, Tensor>;

// The gradients of `hidden` from those of all rows of h U^T and the states before them.
HiddenGradients hidden_gradients(const Tensors& hidden, const Hidden& u, const Tensor& upstream, const Tensor& before);

}  // namespace kronecell
