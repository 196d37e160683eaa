// A product from beginning to end: the matrix packed, and rows of activations in turn rounded and multiplied.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "matmul.h"
#include "scratch.h"

namespace diffquant {

// A packed matrix that holds its memory.
class OwnedMatrix {
 public:
  // `shape` is without memory; codes and scales are MatMulNBits'. Throws std::bad_alloc.
  OwnedMatrix(const MatmulKernel& kernel, PackedMatrix shape, const uint8_t* codes, const float* scales)
      : matrix_(shape) {
    matrix_.group = kernel.group;
    codes_ = allocate(matrix_.groups() * matrix_.group_bytes());
    matrix_.scales_are_short = are_short(scales, shape.channels * shape.blocks());
    scales_ = allocate(matrix_.groups() * matrix_.blocks() * matrix_.group * matrix_.scale_bytes());
    matrix_.codes = static_cast<uint8_t*>(codes_.get());
    matrix_.scales = static_cast<uint8_t*>(scales_.get());
    kernel.pack(matrix_, codes, scales);
  }
  const PackedMatrix& get() const { return matrix_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<void, Free>;

  // Scales of a bfloat16 checkpoint: half of their bytes are a tenth of what a token reads.
  static bool are_short(const float* scales, int64_t count) {
    uint32_t lower = 0;
    for (int64_t i = 0; i < count; ++i) lower |= bits_as<uint32_t>(scales[i]) & 0xffff;
    return !lower;
  }

  static Memory allocate(int64_t bytes) {
    Memory out(std::aligned_alloc(64, round_up(std::max<int64_t>(bytes, 64), 64)));
    if (!out) throw std::bad_alloc();
    return out;
  }

  PackedMatrix matrix_;
  Memory codes_, scales_;
};

namespace {

// Rounded rows that fit a second-level cache beside a group's codes: they are read again for each group.
constexpr int64_t kChunkBytes = 256 * 1024;
// Rows that a kernel may compute together.
constexpr int64_t kRowsOfMemory = 16;
// Work that pays for handing it to another thread.
constexpr int64_t kTaskProducts = 1 << 19, kTaskRoundings = 1 << 15;

// y [rows, channels] of x [rows, width]; parallel(count, task) calls task(0) to task(count - 1).
template <class Parallel>
void multiply_rows(const MatmulKernel& kernel, const PackedMatrix& m, const float* x, int64_t rows, float* y,
                   const Parallel& parallel) {
  const int64_t row_bytes = m.padded() * kernel.activation_bytes(m.bits);
  const int64_t held = kernel.rows ? kernel.rows : std::max<int64_t>(kChunkBytes / row_bytes / 12 * 12, 12);
  const int64_t most = std::min(rows, held);
  Scratch& scratch = Scratch::of_this_thread();
  const int64_t stride = round_up(most, kRowsOfMemory);
  const int64_t code_floats = (stride * row_bytes + 3) / 4;
  scratch.reset(code_floats + 2 * stride * m.blocks(), 3);
  RoundedRows rounded{0, stride, reinterpret_cast<uint8_t*>(scratch.take(code_floats)),
                      scratch.take(stride * m.blocks()),
                      reinterpret_cast<int32_t*>(scratch.take(stride * m.blocks()))};
  for (int64_t first = 0; first < rows; first += most) {
    rounded.rows = std::min(most, rows - first);
    const int64_t rows_each = std::max<int64_t>(kTaskRoundings / m.width, 1);
    parallel((rounded.rows + rows_each - 1) / rows_each, [&](int64_t i) {
      kernel.round(m, x + first * m.width, rounded, i * rows_each, std::min(rounded.rows, (i + 1) * rows_each));
    });
    const int64_t groups_each = std::max<int64_t>(kTaskProducts / (rounded.rows * m.padded() * m.group), 1);
    parallel((m.groups() + groups_each - 1) / groups_each, [&](int64_t i) {
      const int64_t last = std::min(m.groups(), (i + 1) * groups_each);
      kernel.multiply(m, rounded, i * groups_each, last, y + first * m.channels);
    });
  }
}

// The same on this thread alone, with MatMulNBits' codes and scales of a matrix of that shape.
inline void multiply_here(const MatmulKernel& kernel, int64_t rows, const PackedMatrix& shape, const float* x,
                          const uint8_t* codes, const float* scales, float* y) {
  const OwnedMatrix matrix(kernel, shape, codes, scales);
  multiply_rows(kernel, matrix.get(), x, rows, y, [](int64_t count, const auto& task) {
    for (int64_t i = 0; i < count; ++i) task(i);
  });
}

}  // namespace
}  // namespace diffquant
