// A sparse matrix S (outputs, inputs) as the kernels read it: made of values and places once per call, by any width.
#pragma once

#include <cstdint>
#include <vector>

namespace kronecell {

// As it is stored; see kronecell/ops/sparse.py.
struct Sparse {
    const float* values = nullptr;
    const int64_t* places = nullptr;
    long count = 0, block = 1;
};

// Groups of `lanes` outputs; a slot of a group is one entry of each, or nothing where an output has fewer. With `broadcast`
// all outputs of a group have the same inputs, and `inputs_of` has one number a slot, else one for each output.
struct Slots {
    long outputs, inputs, lanes;
    bool broadcast;
    const long* first;          // slots before each group, and all of them
    const int32_t* counts;      // entries of each output
    const int32_t* inputs_of;
    const float* values;        // (slots, lanes); zero where there is no entry

    // Memory for products of many rows, which are transposed.
    long memory() const { return lanes * (inputs + outputs); }
};

// With memory for what it points to. `back` is the transposed matrix.
struct SlotLayout {
    Slots slots{};
    SlotLayout(const float* values, const int64_t* places, long count, long block, long outputs, long inputs, long lanes, bool back);
    SlotLayout(const SlotLayout&) = delete;

  private:
    std::vector<long> first;
    std::vector<int32_t> counts, inputs_of;
    std::vector<float> numbers;
};

}  // namespace kronecell
