// What the operators with weights as integers check of them.
#pragma once

#include "recurrence.h"
#include "tensors.h"
#include "width.h"

namespace kronecell {

// Whether kernels can read them; if not, the reference does.
inline bool is_readable(const Tensor& weight, const Tensor& scales, int64_t bits) {
    return is_float(scales) && weight.scalar_type() == (bits == 8 ? ScalarType::Char : ScalarType::Byte);
}

// `weight` and `scales` must be contiguous.
inline Quantized check_quantized(const char* op, const Tensor& weight, const Tensor& scales, int64_t bits, int64_t group,
                                 long columns) {
    STD_TORCH_CHECK(bits >= 3 && bits <= 8, "kronecell::", op, ": expected 3 to 8 bits, got ", bits);
    STD_TORCH_CHECK(group >= 0, "kronecell::", op, ": expected group to be 0 or a number of columns, got ", group);
    const long bytes = bits == 8 ? columns : (columns + 7) / 8 * bits, groups = group ? columns / group + (columns % group != 0) : 1;
    check_shape(scales, {-1, groups}, op, "scales");
    check_shape(weight, {scales.size(0), bytes}, op, "weight");
    const bool exact = multiplies_bytes() && group % Quantized::EXACT_STEP == 0 && columns <= Quantized::EXACT_COLUMNS;
    return Quantized{static_cast<const unsigned char*>(weight.const_data_ptr()), floats(scales), scales.size(0), columns, bytes,
                     bits, group, groups, exact};
}

// U of a recurrence.
inline Hidden quantized_hidden(const char* op, const Quantized& integers, long gates, long size) {
    STD_TORCH_CHECK(integers.rows == gates * size, "kronecell::", op, ": expected U of ", gates * size, " rows, got ",
                    integers.rows);
    return Hidden{gates, size, integers.columns, 0, false, nullptr, nullptr, &integers};
}

}  // namespace kronecell
