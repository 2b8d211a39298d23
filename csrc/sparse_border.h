// What operators check of a sparse matrix before the kernels read it.
#pragma once

#include <memory>
#include <optional>

#include "buffer.h"
#include "sparse.h"
#include "tensors.h"
#include "width.h"

namespace kronecell {

// The tensor that sparse_prepared returns, in words of 32 bits: a header, and the parts of Windows. It follows from the shape
// of S alone; `words` is 0 where S is multiplied as it is stored.
struct PreparedLayout {
    static constexpr int HEADER = 16;
    long words = 0, entries = 0, stride = 0, turns = 0, bundles = 0;
    bool narrow = false;
    long masks = 0, left = 0, ends = 0, at = 0, values = 0, ordered = 0;  // where they begin; indices come first
    int32_t header[HEADER] = {};

    PreparedLayout(long outputs, long inputs, long count, long block);
    // Of memory with that many words.
    Windows windows(const int32_t* memory) const;
};

// Values and places must be contiguous; `starts` is filled.
Sparse check_sparse(const char* op, const Tensor& values, const Tensor& places, long outputs, long inputs,
                    std::vector<long>& starts);

// S transposed, with blocks of one entry: what gradients are multiplied by.
struct SparseBack {
    Sparse sparse;

    SparseBack(const char* op, const Tensor& values, const Tensor& places, long outputs, long inputs);
    SparseBack(const SparseBack&) = delete;

  private:
    std::vector<long> starts_;
    std::unique_ptr<int64_t[]> places_;
    std::unique_ptr<float[]> values_;
};

// S for the forward product of so many rows: with windows, or with `starts` if `prepared` is not there or for registers of
// another width. It may be of any numbers: none of them leads the kernels out of it or out of x.
struct SparseForward {
    Sparse sparse;

    SparseForward(const char* op, const Tensor& values, const Tensor& places, const std::optional<Tensor>& prepared, long outputs,
                  long inputs, long rows);
    SparseForward(const SparseForward&) = delete;

  private:
    std::vector<long> starts_;
    std::optional<Tensor> prepared_;
    Windows windows_;
};

}  // namespace kronecell
