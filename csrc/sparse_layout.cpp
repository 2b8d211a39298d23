// Entries of a sparse matrix by groups of outputs, as the kernels read them.
#include "sparse.h"

#include <algorithm>

namespace kronecell {

SlotLayout::SlotLayout(const float* values, const int64_t* places, long count, long block, long outputs, long inputs,
                       long lanes, bool back) {
    // Entries are visited by output (or by input, backwards), and within it in the order of the other.
    const long lines = back ? inputs : outputs;
    const bool broadcast = !back && block % lanes == 0, as_stored = broadcast && block == lanes;
    const long groups = (lines + lanes - 1) / lanes;
    counts.assign(groups * lanes, 0);
    long output = 0, start = 0;  // places ascend: the output of one is found without a division
    const auto each = [&](const auto& visit) {
        output = start = 0;
        for (long e = 0; e < count; e++) {
            while (places[e] >= start + inputs) start += inputs, output += block;
            visit(e, output, places[e] - start);
        }
    };
    each([&](long, long o, long i) {
        if (back)
            counts[i] += static_cast<int32_t>(block);
        else if (broadcast)
            for (long b = 0; b < block; b += lanes) counts[o + b]++;
        else
            for (long b = 0; b < block; b++) counts[o + b]++;
    });
    if (broadcast)
        for (long g = 0; g < groups; g++) std::fill_n(counts.begin() + g * lanes + 1, lanes - 1, counts[g * lanes]);
    first.assign(groups + 1, 0);
    for (long g = 0; g < groups; g++)
        first[g + 1] = first[g] + *std::max_element(counts.begin() + g * lanes, counts.begin() + (g + 1) * lanes);
    numbers.assign(as_stored ? 0 : first[groups] * lanes, 0.0f);
    inputs_of.assign(first[groups] * (broadcast ? 1 : lanes), 0);
    std::vector<int32_t> had(groups * lanes, 0);
    each([&](long e, long o, long i) {
        for (long b = 0; broadcast && b < block; b += lanes) {
            const long slot = first[(o + b) / lanes] + had[o + b]++;
            if (!as_stored) std::copy_n(values + e * block + b, lanes, numbers.begin() + slot * lanes);
            inputs_of[slot] = static_cast<int32_t>(i);
        }
        for (long b = 0; !broadcast && b < block; b++) {
            const long line = back ? i : o + b, slot = first[line / lanes] + had[line]++;
            numbers[slot * lanes + line % lanes] = values[e * block + b];
            inputs_of[slot * lanes + line % lanes] = static_cast<int32_t>(back ? o + b : i);
        }
    });
    slots = Slots{lines, back ? outputs : inputs, lanes, broadcast, first.data(), counts.data(), inputs_of.data(),
                  as_stored ? values : numbers.data()};
}

}  // namespace kronecell
