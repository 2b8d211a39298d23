// small_products: all hoisted products of weights of a plan in one call, and their gradients. Each as an operation of its own
// takes longer to be called than to be computed. kronecell/ops/small_products.py writes the description.
#include <memory>

#include "tensors.h"

namespace kronecell {
struct SmallProduct {
    long a, b, out;                    // tensors: the inputs, then what the products compute, in order
    long batch, rows, summed, columns;
    const int64_t *a_table, *b_table;  // where numbers lie in the operand, in the order in which they are read; or null
    const int64_t* out_table;          // where numbers of the result go; or null
};
}  // namespace kronecell

#define KERNEL_FILE "products_kernel.h"
#include "widths.h"

namespace kronecell {

constexpr int64_t VERSION = 1;

// The description, checked before it is used: header (version, inputs, products, results), a size for each tensor, a row of
// ten for each product (a, b, out, batch, rows, summed, columns, and where the tables of a, b and out begin, or -1), for each
// result its tensor, the number of its dimensions and their sizes, and then the tables.
class Description {
public:
    Description(const Tensor& tensor, const char* op) : op_(op) {
        STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long,
                        "kronecell::", op, ": expected a description of int64 in one dimension on the CPU");
        kept_ = made_contiguous(tensor);
        at_ = static_cast<const int64_t*>(kept_.const_data_ptr());
        end_ = at_ + kept_.numel();
        check(next() == VERSION);
        inputs = next();
        const int64_t products_count = next(), results_count = next();
        check(inputs >= 0 && products_count >= 0 && results_count >= 0 && products_count <= room() && inputs <= room());
        for (int64_t i = 0; i < inputs + products_count; i++) {
            sizes.push_back(next());
            check(sizes.back() > 0 && sizes.back() <= LARGEST);
        }
        std::vector<std::array<int64_t, 3>> begins;
        for (int64_t i = 0; i < products_count; i++) {
            SmallProduct p{};
            p.a = next(), p.b = next(), p.out = next();
            check(p.a >= 0 && p.b >= 0 && p.a < inputs + i && p.b < inputs + i && p.out == inputs + i);
            p.batch = next(), p.rows = next(), p.summed = next(), p.columns = next();
            for (const long size : {p.batch, p.rows, p.summed, p.columns}) check(size > 0 && size <= LARGEST);
            check(p.batch * p.rows <= LARGEST && p.batch * p.rows * p.summed == sizes[p.a]);
            check(p.batch * p.summed <= LARGEST && p.batch * p.summed * p.columns == sizes[p.b]);
            check(p.batch * p.rows * p.columns == sizes[p.out]);
            begins.push_back({next(), next(), next()});
            products.push_back(p);
        }
        for (int64_t i = 0; i < results_count; i++) {
            const int64_t tensor_of = next(), dims = next();
            check(tensor_of >= inputs && tensor_of < inputs + products_count && dims >= 0 && dims <= room());
            std::vector<int64_t> shape;
            int64_t numbers = 1;
            for (int64_t d = 0; d < dims; d++) {
                shape.push_back(next());
                check(shape.back() > 0 && shape.back() <= LARGEST && (numbers *= shape.back()) <= LARGEST);
            }
            check(numbers == sizes[tensor_of]);
            for (const int64_t other : results) check(other != tensor_of);  // each has storage of its own
            results.push_back(tensor_of), shapes.push_back(shape);
        }
        for (int64_t i = 0; i < products_count; i++) {
            SmallProduct& p = products[i];
            p.a_table = table(begins[i][0], sizes[p.a]);
            p.b_table = table(begins[i][1], sizes[p.b]);
            p.out_table = table(begins[i][2], sizes[p.out]);
        }
    }

    void check_inputs(const std::vector<Tensor>& tensors) const {
        STD_TORCH_CHECK(static_cast<int64_t>(tensors.size()) == inputs, "kronecell::", op_, ": expected ", inputs,
                        " inputs, got ", tensors.size());
        for (int64_t i = 0; i < inputs; i++) {
            STD_TORCH_CHECK(tensors[i].numel() == sizes[i], "kronecell::", op_, ": expected ", sizes[i],
                            " numbers in input ", i, ", got ", tensors[i].numel());
            check_cpu(tensors[i], op_, "every input");
        }
    }

    int64_t inputs = 0;
    std::vector<int64_t> sizes, results;
    std::vector<SmallProduct> products;
    std::vector<std::vector<int64_t>> shapes;

private:
    static constexpr int64_t LARGEST = 1L << 30;  // products of two such sizes do not overflow

    void check(bool right) const {
        STD_TORCH_CHECK(right, "kronecell::", op_, ": the description does not fit itself; it is written by products_of()");
    }
    int64_t room() const { return end_ - at_; }
    int64_t next() {
        check(at_ < end_);
        return *at_++;
    }
    const int64_t* table(int64_t begin, int64_t size) const {
        if (begin == -1) return nullptr;
        check(begin >= 0 && begin <= room() && size <= room() - begin);
        uint64_t most = 0;  // a negative index is a large one
        for (int64_t i = 0; i < size; i++) most = std::max(most, static_cast<uint64_t>(at_[begin + i]));
        check(most < static_cast<uint64_t>(size));
        return at_ + begin;
    }

    const char* op_;
    Tensor kept_{torch::stable::Tensor()};
    const int64_t *at_ = nullptr, *end_ = nullptr;
};

constexpr long BEHIND = 32;  // numbers that a kernel may read behind an operand

// An operand in the order in which it is read. Inputs are copied in any case: nothing is read behind their end.
static const float* gathered(const float* from, const int64_t* table, float* to, long size) {
    if (!table) return static_cast<const float*>(memcpy(to, from, sizeof(float) * size));
    for (long i = 0; i < size; i++) to[i] = from[table[i]];
    return to;
}

// Where all tensors lie while the products run.
struct Memory {
    Memory(const Description& d, std::vector<Tensor>& inputs) {
        long most = 0;
        for (const int64_t size : d.sizes) most = std::max<long>(most, size + BEHIND);
        long all = 4 * most;
        for (size_t i = d.inputs; i < d.sizes.size(); i++) all += d.sizes[i];
        buffer = std::make_unique<Buffer>(all);
        float* next = buffer->get();
        for (float*& part : scratch) part = next, next += most;
        for (Tensor& tensor : inputs) {
            tensor = made_contiguous(tensor);
            at.push_back(const_cast<float*>(floats(tensor)));  // inputs are read only
        }
        for (size_t i = d.inputs; i < d.sizes.size(); i++) at.push_back(next), next += d.sizes[i];
    }

    void multiply(const Description& d, const SmallProduct& p) {
        const float* a = gathered(at[p.a], p.a_table, scratch[0], d.sizes[p.a]);
        const float* b = gathered(at[p.b], p.b_table, scratch[1], d.sizes[p.b]);
        float* out = p.out_table ? scratch[2] : at[p.out];
        CALL(small_product, p, a, b, out);
        for (long i = 0; p.out_table && i < d.sizes[p.out]; i++) at[p.out][p.out_table[i]] = out[i];
    }

    std::unique_ptr<Buffer> buffer;
    std::array<float*, 4> scratch{};
    std::vector<float*> at;
};

static bool all_float(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors)
        if (!is_float(tensor)) return false;
    return true;
}

static std::vector<Tensor> small_products_op(std::vector<Tensor> inputs, Tensor description, std::vector<int64_t> wanted_shapes) {
    const Description d(description, "small_products");
    d.check_inputs(inputs);
    std::vector<int64_t> flat;
    for (const auto& shape : d.shapes) {
        flat.push_back(static_cast<int64_t>(shape.size()));
        flat.insert(flat.end(), shape.begin(), shape.end());
    }
    STD_TORCH_CHECK(flat == wanted_shapes, "kronecell::small_products: the shapes of the results are not those of the description");
    if (!all_float(inputs))
        return dispatch<std::vector<Tensor>>("kronecell_reference::small_products", "", inputs, description, wanted_shapes);
    std::vector<Tensor> results;
    if (inputs.empty()) return results;
    Memory memory(d, inputs);
    for (size_t i = 0; i < d.results.size(); i++) {
        results.push_back(new_floats(inputs[0], d.shapes[i]));
        memory.at[d.results[i]] = floats_of(results.back());
    }
    for (const SmallProduct& p : d.products) memory.multiply(d, p);
    return results;
}

static std::vector<Tensor> small_products_backward_op(std::vector<Tensor> upstream, std::vector<Tensor> inputs,
                                                      Tensor description, std::vector<bool> wanted) {
    const Description d(description, "small_products_backward");
    d.check_inputs(inputs);
    STD_TORCH_CHECK(static_cast<int64_t>(wanted.size()) == d.inputs, "kronecell::small_products_backward: expected ", d.inputs,
                    " of `wanted`, got ", wanted.size());
    STD_TORCH_CHECK(upstream.size() == d.results.size(), "kronecell::small_products_backward: expected ", d.results.size(),
                    " upstream gradients, got ", upstream.size());
    for (size_t i = 0; i < upstream.size(); i++) {
        check_cpu(upstream[i], "small_products_backward", "every upstream gradient");
        STD_TORCH_CHECK(upstream[i].numel() == d.sizes[d.results[i]] || upstream[i].numel() == 0,
                        "kronecell::small_products_backward: upstream gradient ", i, " has ", upstream[i].numel(),
                        " numbers, its result ", d.sizes[d.results[i]]);
    }
    if (!all_float(inputs) || !all_float(upstream)) {
        const std::unique_ptr<bool[]> flags(new bool[wanted.size() + 1]);
        for (size_t i = 0; i < wanted.size(); i++) flags[i] = wanted[i];
        return dispatch<std::vector<Tensor>>("kronecell_reference::small_products_backward", "", upstream, inputs, description,
                                             torch::headeronly::HeaderOnlyArrayRef<bool>(flags.get(), wanted.size()));
    }
    std::vector<Tensor> gradients;
    if (inputs.empty()) return gradients;
    Memory memory(d, inputs);
    long all = 0;
    for (const int64_t size : d.sizes) all += size;
    const Buffer buffer(all, true);
    std::vector<float*> of;
    for (float* next = buffer.get(); of.size() < d.sizes.size(); next += d.sizes[of.size() - 1]) of.push_back(next);
    for (size_t i = 0; i < upstream.size(); i++) {
        const Tensor gradient = made_contiguous(upstream[i]);
        if (gradient.numel()) memcpy(of[d.results[i]], floats(gradient), sizeof(float) * d.sizes[d.results[i]]);
    }
    std::vector<bool> used(d.sizes.size());
    for (const SmallProduct& p : d.products) used[p.a] = used[p.b] = true;
    for (const SmallProduct& p : d.products)
        if (used[p.out]) memory.multiply(d, p);
    const auto [a_space, b_space, up_space, of_space] = memory.scratch;
    const long most = *std::max_element(d.sizes.begin(), d.sizes.end()) + BEHIND;
    const Buffer second(most), transposed(most);
    for (auto p = d.products.rbegin(); p != d.products.rend(); p++) {
        const long a_size = d.sizes[p->a], b_size = d.sizes[p->b];
        const float* a = gathered(memory.at[p->a], p->a_table, a_space, a_size);
        const float* b = gathered(memory.at[p->b], p->b_table, b_space, b_size);
        const float* up = gathered(of[p->out], p->out_table, up_space, d.sizes[p->out]);
        CALL(small_gradients, *p, a, b, up, of_space, second.get(), transposed.get());
        for (long i = 0; i < a_size; i++) of[p->a][p->a_table ? p->a_table[i] : i] += of_space[i];
        for (long i = 0; i < b_size; i++) of[p->b][p->b_table ? p->b_table[i] : i] += second.get()[i];
    }
    for (size_t i = 0; i < inputs.size(); i++) {
        gradients.push_back(wanted[i] ? torch::stable::empty_like(inputs[i]) : new_floats(inputs[i], {0}));
        if (wanted[i]) memcpy(floats_of(gradients.back()), of[i], sizeof(float) * d.sizes[i]);
    }
    return gradients;
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("small_products(Tensor[] inputs, Tensor description, int[] shapes) -> Tensor[]");
    m.def("small_products_backward(Tensor[] upstream, Tensor[] inputs, Tensor description, bool[] wanted) -> Tensor[]");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) {
    m.impl("small_products", TORCH_BOX(&small_products_op));
    m.impl("small_products_backward", TORCH_BOX(&small_products_backward_op));
}

}  // namespace kronecell
