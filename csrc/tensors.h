// What every operator needs of torch: checks with a clear error, the pure-torch reference, threads.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kronecell {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }
inline bool is_byte(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Byte; }

inline std::string shape_of(const Tensor& tensor) {
    std::string text = "(";
    for (int64_t i = 0; i < tensor.dim(); i++) text += (i ? ", " : "") + std::to_string(tensor.size(i));
    return text + ")";
}

// The error says which operator, which argument, and what it got.
inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* op, const char* name) {
    bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
    std::string wanted;
    int64_t i = 0;
    for (const int64_t size : shape) {  // -1: any
        if (fits && size >= 0) fits = tensor.size(i) == size;
        wanted += (i++ ? ", " : "") + (size < 0 ? std::string("*") : std::to_string(size));
    }
    STD_TORCH_CHECK(fits, "kronecell::", op, ": expected ", name, " of shape (", wanted, "), got ", shape_of(tensor));
}

inline void check_cpu(const Tensor& tensor, const char* op, const char* name) {
    STD_TORCH_CHECK(tensor.is_cpu(), "kronecell::", op, ": expected ", name, " on the CPU as the other arguments");
}

inline Tensor made_contiguous(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
inline float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// Large memory comes from the system page by page, as it is written: in pages of 4 KB that takes three times as long as in
// huge ones, and longer than many a product takes to write there.
inline void ask_for_huge_pages(void* memory, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::size_t large = 4u << 20, page = 4096;
    const std::size_t begin = reinterpret_cast<std::size_t>(memory), first = (begin + page - 1) / page * page;
    if (bytes >= large) madvise(reinterpret_cast<void*>(first), (begin + bytes - first) / page * page, MADV_HUGEPAGE);
#endif
}

// Directly, not through the dispatcher: that costs a microsecond, and some operators have five results.
inline Tensor new_floats(const Tensor&, const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                           aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
    const Tensor tensor(made);
    ask_for_huge_pages(tensor.mutable_data_ptr(), sizeof(float) * static_cast<std::size_t>(tensor.numel()));
    return tensor;
}
inline Tensor new_zero_floats(const Tensor& like, std::vector<int64_t> shape) {
    return torch::stable::new_zeros(like, shape, ScalarType::Float);
}

template <class Result, std::size_t... I>
Result results(StableIValue* stack, std::index_sequence<I...>) {
    return Result{torch::stable::detail::to<std::tuple_element_t<I, Result>>(stack[I])...};
}

// Calls an operator by name through the dispatcher.
template <class Result, class... Args>
Result dispatch(const char* name, const char* overload, const Args&... args) {
    std::array<StableIValue, (sizeof...(Args) > 8 ? sizeof...(Args) : 8)> stack{torch::stable::detail::from(args)...};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
    if constexpr (std::is_same_v<Result, Tensor> || std::is_same_v<Result, std::vector<Tensor>>) {
        return torch::stable::detail::to<Result>(stack[0]);
    } else {
        return results<Result>(stack.data(), std::make_index_sequence<std::tuple_size_v<Result>>());
    }
}

// Calls f(first, last) for parts of `count`, on as many threads as the multiply-adds are worth.
template <class F>
void in_parallel(long count, long work, const F& f) {
    constexpr long worth_a_thread = 1L << 20;
    long threads = work / worth_a_thread;
    if (threads > 1) threads = std::min<long>({threads, torch::stable::get_num_threads(), count});
    if (threads <= 1) {
        f(0L, count);
        return;
    }
    const long each = (count + threads - 1) / threads;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (long t = begin; t < end; t++)
            if (t * each < count) f(t * each, std::min(count, (t + 1) * each));
    });
}

}  // namespace kronecell
