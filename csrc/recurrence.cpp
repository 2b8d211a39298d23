// The gradients of U, which are one product over all steps.
#include "recurrence_border.h"

namespace kronecell {

Tensor states_before(const Layout& layout, const Tensor& output, const Tensor& h) {
    const long width = h.size(1);
    const Tensor before = new_floats(h, {layout.total, width});
    const float *from = floats(output), *first = floats(h);
    float* to = floats_of(before);
    const Steps& steps = layout.steps;
    for (long turn = 0, had = 0, previous = 0; turn < steps.count; turn++) {
        const long t = steps.at(turn), rows = steps.rows[t], some = std::min(rows, had);
        float* at = to + steps.first[t] * width;
        if (some) std::copy_n(from + steps.first[previous] * width, some * width, at);
        if (some < rows) std::copy_n(first + some * width, (rows - some) * width, at + some * width);
        had = rows, previous = t;
    }
    return before;
}

static Tensor transposed(const Tensor& tensor) { return torch::stable::transpose(tensor, 0, 1); }

HiddenGradients hidden_gradients(const Tensors& hidden, const Hidden& u, const Tensor& upstream, const Tensor& before) {
    if (hidden.size() == 1) return {multiply(transposed(upstream), before), new_floats(before, {0})};
    const Tensor &in = hidden[0], &out = hidden[1];
    Tensor narrow = multiply(before, transposed(in));
    if (!u.by_gate) {
        const Tensor of_narrow = multiply(upstream, transposed(out));
        return {multiply(transposed(of_narrow), before), multiply(transposed(narrow), upstream)};
    }
    Tensor of_narrow = new_floats(before, {before.size(0), u.narrow()}), of_out = new_floats(out, {u.gates, u.rank, u.size});
    Tensor from = upstream;
    for (long g = 0; g < u.gates; g++) {
        const Tensor up = torch::stable::narrow(from, 1, g * u.size, u.size);
        Tensor place = torch::stable::narrow(of_narrow, 1, g * u.rank, u.rank);
        torch::stable::copy_(place, multiply(up, transposed(torch::stable::select(out, 0, g))));
        place = torch::stable::select(of_out, 0, g);
        torch::stable::copy_(place, multiply(transposed(torch::stable::narrow(narrow, 1, g * u.rank, u.rank)), up));
    }
    return {multiply(transposed(of_narrow), before), of_out};
}

}  // namespace kronecell
