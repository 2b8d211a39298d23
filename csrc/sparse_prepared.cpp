// sparse_prepared: a sparse matrix in the order in which the kernels multiply it, once for many calls.
#include "sparse_border.h"

#define KERNEL_FILE "sparse_sound_kernel.h"
#include "widths.h"

namespace kronecell {

constexpr int32_t MAGIC = 0x7370636b, VERSION = 1;
constexpr long WORDS = 16;  // of a line of the cache, in which every part begins

static long lines(long words) { return (words + WORDS - 1) / WORDS * WORDS; }

PreparedLayout::PreparedLayout(long outputs, long inputs, long count, long block) {
    const int width = register_width();
    if (width != Windows::LANES || count * block == 0 || block % width == 0) return;
    if (inputs >= 1L << (32 - Windows::LANE_BITS) || outputs > INT32_MAX || count > INT32_MAX / block) return;
    entries = count * block;
    // A long stride leaves lanes without entries fewer turns, and more entries without a turn. Measured: with whole
    // registers of values, the square of the stride times the density is best at 6; with half ones, which are loaded
    // faster, a lane must have less than a third of an entry in a turn.
    const double density = static_cast<double>(entries) / (static_cast<double>(outputs) * static_cast<double>(inputs));
    long whole = Windows::INPUTS, half = Windows::INPUTS;
    while (whole > 1 && static_cast<double>(whole * whole) * density > 6) whole--;
    while (half > 1 && static_cast<double>(half) * density > 0.33) half--;
    half = std::min(whole, half);
    narrow = 5 * half >= 4 * whole;
    stride = narrow ? half : whole;
    turns = inputs > Windows::INPUTS ? (inputs - Windows::INPUTS + stride - 1) / stride + 1 : (Windows::INPUTS + stride - 1) / stride;
    bundles = (outputs + Windows::OUTPUTS - 1) / Windows::OUTPUTS;
    masks = HEADER + bundles * turns * Windows::LANES;
    left = lines(masks + bundles * turns * Windows::MASKS / 2);
    ends = lines(left + bundles);
    at = lines(ends + bundles * Windows::OUTPUTS);
    ordered = lines(at + entries);
    values = lines(ordered + entries);
    words = lines(values + entries) + WORDS;  // the last values are read as a whole register
    const int32_t facts[] = {MAGIC, VERSION, width, static_cast<int32_t>(outputs), static_cast<int32_t>(inputs),
                             static_cast<int32_t>(count), static_cast<int32_t>(block), static_cast<int32_t>(stride), narrow};
    std::copy(std::begin(facts), std::end(facts), header);
}

Windows PreparedLayout::windows(const int32_t* memory) const {
    const auto words_at = [&](long at) { return reinterpret_cast<const uint32_t*>(memory + at); };
    return Windows{stride, turns, bundles, narrow, words_at(HEADER), reinterpret_cast<const uint16_t*>(memory + masks),
                   memory + left, memory + ends, words_at(at), reinterpret_cast<const float*>(memory + values),
                   reinterpret_cast<const float*>(memory + ordered)};
}

// Making -------------------------------------------------------------------------------------------------------------------

// What one output takes in turn: its entries from `next` on, `step` values apart.
struct Row {
    const int64_t* place;
    const int64_t* end;
    const float* value;
    long step, start;  // of its places
    long input() const { return *place - start; }
    void skip() { place++, value += step; }
};

class Maker {
  public:
    Maker(const Sparse& s, const PreparedLayout& l, int32_t* memory)
        : s_(s), w_(l.windows(memory)), indices_(const_cast<uint32_t*>(w_.indices)), masks_(const_cast<uint16_t*>(w_.masks)),
          left_(const_cast<int32_t*>(w_.left)), ends_(const_cast<int32_t*>(w_.ends)), at_(const_cast<uint32_t*>(w_.at)),
          values_(const_cast<float*>(w_.values)), ordered_(const_cast<float*>(w_.ordered)) {
        for (long b = 0; b < w_.bundles; b++) bundle(b);
    }

  private:
    const Sparse& s_;
    const Windows w_;
    uint32_t* indices_;
    uint16_t* masks_;
    int32_t *left_, *ends_;
    uint32_t* at_;
    float *values_, *ordered_;
    std::vector<std::pair<uint32_t, float>> taken_, untaken_;

    static uint32_t place_of(long lane, const Row& row) {
        return static_cast<uint32_t>(lane | row.input() << Windows::LANE_BITS);
    }

    void bundle(long number) {
        const long first = number * Windows::OUTPUTS;
        std::vector<Row> rows(Windows::OUTPUTS, Row{});
        for (long i = 0; i < Windows::OUTPUTS && first + i < s_.outputs; i++) {
            const long k = (first + i) / s_.block, b = (first + i) % s_.block, from = s_.starts[k];
            rows[i] = Row{s_.places + from, s_.places + s_.starts[k + 1], s_.values + from * s_.block + b, s_.block, k * s_.inputs};
        }
        taken_.clear(), untaken_.clear();
        for (long t = 0; t < w_.turns; t++, indices_ += Windows::LANES, masks_ += Windows::MASKS)
            for (long g = 0; g < Windows::GROUPS; g++)
                masks_[g] = group(rows.data() + g * Windows::LANES, g, t);
        for (long i = 0; i < Windows::OUTPUTS; i++)
            for (Row& row = rows[i]; row.place != row.end; row.skip()) untaken_.emplace_back(place_of(i, row), *row.value);
        left_[number] = static_cast<int32_t>(untaken_.size());
        for (const auto& [at, value] : untaken_) *at_++ = at, *values_++ = *ordered_++ = value;
        for (const auto& entry : taken_) *values_++ = entry.second;
        const auto output = [](const auto& entry) { return entry.first % (1u << Windows::LANE_BITS); };
        std::stable_sort(taken_.begin(), taken_.end(), [&](const auto& a, const auto& b) { return output(a) < output(b); });
        for (const auto& [at, value] : taken_) *at_++ = at, *ordered_++ = value, ends_[at % (1u << Windows::LANE_BITS)]++;
        for (long i = 1; i < Windows::OUTPUTS; i++) ends_[i] += ends_[i - 1];
        ends_ += Windows::OUTPUTS;
    }

    // The lanes of a group that have an entry in turn t; what is past it stays without a turn.
    uint16_t group(Row* rows, long g, long t) {
        const long begin = w_.begin(t, s_.inputs), end = begin + Windows::INPUTS;
        const long next = t + 1 < w_.turns ? w_.begin(t + 1, s_.inputs) : s_.inputs;
        uint32_t mask = 0;
        long most = w_.narrow ? Windows::FEW : Windows::LANES;
        for (const long before : {next, end})  // first those for which it is the last turn
            for (long i = 0; i < Windows::LANES && most; i++) {
                Row& row = rows[i];
                if (mask >> i & 1 || row.place == row.end || row.input() >= before) continue;
                mask |= 1u << i, most--;
            }
        for (long i = 0; i < Windows::LANES; i++) {
            Row& row = rows[i];
            const long lane = g * Windows::LANES + i;
            if (mask >> i & 1) {
                indices_[i] |= static_cast<uint32_t>(row.input() - begin) << Windows::INDEX_BITS * g;
                taken_.emplace_back(place_of(lane, row), *row.value);
                row.skip();
            }
            for (; row.place != row.end && row.input() < next; row.skip()) untaken_.emplace_back(place_of(lane, row), *row.value);
        }
        return static_cast<uint16_t>(mask);
    }
};

static int64_t sparse_prepared_size(int64_t outputs, int64_t inputs, int64_t count, int64_t block) {
    return PreparedLayout(outputs, inputs, count, block).words;
}

static Tensor sparse_prepared(Tensor values, Tensor places, int64_t outputs, int64_t inputs) {
    const char* op = "sparse_prepared";
    check_cpu(values, op, "values");
    if (!is_float(values))
        return dispatch<Tensor>("kronecell_reference::sparse_prepared", "", values, places, outputs, inputs);
    values = made_contiguous(values), places = made_contiguous(places);
    std::vector<long> starts;
    const Sparse sparse = check_sparse(op, values, places, outputs, inputs, starts);
    const PreparedLayout layout(outputs, inputs, sparse.count, sparse.block);
    const Tensor made = torch::stable::new_zeros(values, {layout.words}, ScalarType::Int);
    if (!layout.words) return made;
    int32_t* memory = static_cast<int32_t*>(made.mutable_data_ptr());
    std::copy_n(layout.header, PreparedLayout::HEADER, memory);
    const Maker maker(sparse, layout, memory);
    return made;
}

// Checks -------------------------------------------------------------------------------------------------------------------

Sparse check_sparse(const char* op, const Tensor& values, const Tensor& places, long outputs, long inputs,
                    std::vector<long>& starts) {
    check_cpu(places, op, "places");
    STD_TORCH_CHECK(places.scalar_type() == ScalarType::Long && places.dim() == 1, "kronecell::", op,
                    ": expected places to be int64 numbers in one dimension");
    check_shape(values, {places.size(0), -1}, op, "values");
    const int64_t* at = static_cast<const int64_t*>(places.const_data_ptr());
    const long count = places.size(0), block = values.size(1);
    STD_TORCH_CHECK(outputs >= 0 && block > 0 && outputs % block == 0, "kronecell::", op, ": expected blocks that divide the ",
                    outputs, " outputs, got ", block);
    const int64_t end = outputs / block * inputs;
    starts.clear(), starts.reserve(outputs / block + 1);
    int64_t before = -1, next = 0;  // places of the outputs that begin now are from `next` on
    for (long i = 0; i < count; before = at[i++]) {
        STD_TORCH_CHECK(at[i] > before && at[i] < end, "kronecell::", op, ": expected places that ascend and are below ", end,
                        ", got ", at[i], " after ", before);
        for (; at[i] >= next; next += inputs) starts.push_back(i);
    }
    starts.resize(outputs / block + 1, count);
    return Sparse{outputs, inputs, count, block, floats(values), at, starts.data(), nullptr};
}

SparseBack::SparseBack(const char* op, const Tensor& values, const Tensor& places, long outputs, long inputs)
    : starts_(inputs + 1, 0) {
    std::vector<long> starts;
    const Sparse s = check_sparse(op, values, places, outputs, inputs, starts);
    places_.reset(new int64_t[s.count * s.block]), values_.reset(new float[s.count * s.block]);
    const auto each = [&](const auto& visit) {
        for (long k = 0; k < outputs / s.block; k++)
            for (long e = starts[k]; e < starts[k + 1]; e++) visit(e, k * s.block, s.places[e] - k * inputs);
    };
    each([&](long, long, long input) { starts_[input] += s.block; });
    // Where the entries of an input begin; then, as they are placed, where its next one goes.
    for (long i = 0, sum = 0; i <= inputs; i++) sum += std::exchange(starts_[i], sum);
    each([&](long e, long output, long input) {
        long& next = starts_[input];
        for (long b = 0; b < s.block; b++, next++) {
            places_[next] = input * outputs + output + b;
            values_[next] = s.values[e * s.block + b];
        }
    });
    starts_.insert(starts_.begin(), 0);  // each is now where those of the next input begin
    sparse = Sparse{inputs, outputs, s.count * s.block, 1, values_.get(), places_.get(), starts_.data(), nullptr};
}

SparseForward::SparseForward(const char* op, const Tensor& values, const Tensor& places, const std::optional<Tensor>& prepared,
                             long outputs, long inputs, long rows) {
    if (prepared && prepared->numel()) {
        check_cpu(*prepared, op, "prepared");
        prepared_ = made_contiguous(*prepared);
        const long words = prepared_->numel();
        const bool readable = prepared_->scalar_type() == ScalarType::Int && words >= PreparedLayout::HEADER;
        const int32_t* memory = readable ? static_cast<const int32_t*>(prepared_->const_data_ptr()) : nullptr;
        STD_TORCH_CHECK(readable && memory[0] == MAGIC && memory[1] == VERSION, "kronecell::", op,
                        ": expected prepared to be what kronecell::sparse_prepared of this version returns");
        if (memory[2] == register_width()) {
            check_shape(values, {-1, -1}, op, "values"), check_shape(places, {values.size(0)}, op, "places");
            const PreparedLayout layout(outputs, inputs, values.size(0), values.size(1));
            STD_TORCH_CHECK(words == layout.words && std::equal(layout.header, layout.header + PreparedLayout::HEADER, memory),
                            "kronecell::", op, ": expected prepared to be of ", values.size(0), " blocks of ", values.size(1),
                            " in a matrix of ", outputs, " x ", inputs, ", and it is of another one");
            windows_ = layout.windows(memory);
            STD_TORCH_CHECK(CALL(windows_are_sound, windows_, layout.entries, outputs, inputs, rows >= MANY_ROWS_OF_WINDOWS), "kronecell::", op,
                            ": prepared is damaged: its entries do not add up, or lead out of the matrix");
            sparse = Sparse{outputs, inputs, values.size(0), values.size(1), nullptr, nullptr, nullptr, &windows_};
            return;
        }
    }
    sparse = check_sparse(op, values, places, outputs, inputs, starts_);
}

STABLE_TORCH_LIBRARY_FRAGMENT(kronecell, m) {
    m.def("sparse_prepared_size(int outputs, int inputs, int count, int block) -> int");
    m.def("sparse_prepared(Tensor values, Tensor places, int outputs, int inputs) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(kronecell, CPU, m) { m.impl("sparse_prepared", TORCH_BOX(&sparse_prepared)); }
STABLE_TORCH_LIBRARY_IMPL(kronecell, CompositeExplicitAutograd, m) {
    m.impl("sparse_prepared_size", TORCH_BOX(&sparse_prepared_size));
}

}  // namespace kronecell
