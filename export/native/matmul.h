// The product of activations with a matrix of codes, as every instruction set computes it: bit by bit the same.
//
// A row of activations is rounded to int8 with a scale for each block of columns, absmax / 127. In each block the
// product is a whole number, exact in int32. An output is a chain of fused multiply-adds over the blocks in order:
//     y = fma(product, activation_scale * weight_scale, y)
// so it depends neither on the instruction set nor on how many rows are computed together.
#pragma once

#include <cstdint>

#include "problem.h"

namespace diffquant {

// A matrix of codes in a kernel's order: for each group of channels, which lie side by side, a run of codes, then the
// next group's.
// Four neighbouring columns of a channel fill 32 bits; at 4 bits a byte holds a column and the one four further.
struct PackedMatrix {
  int64_t channels, width, block, bits;
  uint8_t* codes;
  uint8_t* scales;  // [groups, blocks, group]: floats, or their upper halves where the lower ones are all zero
  int64_t group = 0;  // channels; the kernel's
  bool scales_are_short = false;

  DIFFQUANT_INLINE int64_t blocks() const { return (width + block - 1) / block; }
  DIFFQUANT_INLINE int64_t padded() const { return blocks() * block; }
  DIFFQUANT_INLINE int64_t scale_bytes() const { return scales_are_short ? 2 : 4; }
  DIFFQUANT_INLINE int64_t groups() const { return (channels + group - 1) / group; }
  DIFFQUANT_INLINE int64_t group_bytes() const { return padded() * group * bits / 8; }
};

// Rows of activations, rounded: codes of int8 or int16 [stride, padded], the others [blocks, stride].
struct RoundedRows {
  int64_t rows;
  // Rows that there is memory for: a kernel may compute whole tiles of them.
  int64_t stride;
  uint8_t* codes;
  float* scales;
  // What a zero point adds to a block's product.
  int32_t* offsets;
};

struct MatmulKernel {
  const char* name;
  // Channels whose codes lie side by side.
  int64_t group;
  // Rows that are rounded and multiplied in one go, or 0 for as many as a cache holds.
  int64_t rows;
  // Bytes of a rounded activation, for codes of so many bits.
  int64_t (*activation_bytes)(int64_t bits);
  // Fills a packed matrix, whose memory is there, from MatMulNBits' codes [channels, blocks, block * bits / 8] and
  // scales [channels, blocks].
  void (*pack)(const PackedMatrix&, const uint8_t* codes, const float* scales);
  // Rounds rows first to last - 1 of x [rows, width].
  void (*round)(const PackedMatrix&, const float* x, const RoundedRows&, int64_t first, int64_t last);
  // Channels of the groups first to last - 1 of y [rows, channels].
  void (*multiply)(const PackedMatrix&, const RoundedRows&, int64_t first, int64_t last, float* y);
};

// Each is compiled for the processors of its kind alone.
extern const MatmulKernel kPlainMatmul, kAvx2Matmul, kVnniMatmul, kAmxMatmul, kNeonMatmul;

// The kernel for this processor, or null if there is none that beats ONNX Runtime's own.
const MatmulKernel* matmul_kernel();
// The kernel of that name (plain, avx2, avx512vnni, amx, neon), or null if this processor cannot run it.
const MatmulKernel* find_matmul_kernel(const char* name);
// Sessions that are opened from now on use the kernel of that name; returns whether this processor runs it.
bool use_matmul_kernel(const char* name);

}  // namespace diffquant
