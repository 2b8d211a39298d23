// Products of matrices for other operators.
#pragma once

#include "tensors.h"

namespace kronecell {

// a @ b of two matrices or of two batches of them, float32 on the CPU with any strides, by the faster kernel.
Tensor multiply(const Tensor& a, const Tensor& b);

}  // namespace kronecell
