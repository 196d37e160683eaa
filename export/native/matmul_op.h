#pragma once

#include "ort_api.h"

namespace diffquant {

// The op MatMulNBits by matmul_kernel(), which must not be null: the inputs and attributes of com.microsoft's op of that
// name, activations in float, codes without zero points, accuracy level 4.
const ort::CustomOp& matmul_op();

// How often it has run in this process.
int64_t matmul_calls();

}  // namespace diffquant
