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
        // One number more than asked for, in whole lines of the cache: never an empty allocation.
        const std::size_t bytes = (static_cast<std::size_t>(numbers) * sizeof(float) / 64 + 1) * 64;
        data_ = static_cast<float*>(zeros ? std::calloc(bytes, 1) : std::malloc(bytes));
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
