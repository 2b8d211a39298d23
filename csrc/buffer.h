// Memory for float32 numbers that lives inside a call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace kronecell {

class Buffer {
public:
    explicit Buffer(long numbers, bool zeros = false) {
        // In whole lines of the cache, and at the start of one: registers that cross lines are loaded twice as slowly.
        const std::size_t bytes = (static_cast<std::size_t>(numbers) * sizeof(float) / 64 + 1) * 64;
        data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
        if (data_ && zeros) std::memset(data_, 0, bytes);
        if (!data_) throw std::bad_alloc();
    }
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* get() const { return data_; }

private:
    float* data_;
};

}  // namespace kronecell
