// What the instruction sets share: packing, rounding, and the loops around the tile that each brings.
#pragma once

#include <cstring>

#include "matmul.h"
#include "scalar.h"

namespace diffquant {
namespace {

// Rows and channels that a tile computes at once, and all that it reads.
struct Tile {
  const PackedMatrix& matrix;
  const uint8_t* codes;      // of the group
  const uint8_t* scales;     // of the group [blocks, group]
  const uint8_t* activations;
  int64_t row_bytes;
  int64_t all_rows;
  const float* activation_scales;  // [blocks, all_rows], from the tile's first row on
  const int32_t* offsets;          // alike
  float* sums;                     // [rows, group]
};

// What an instruction set takes from here where it says nothing else: codes in their order, times int8.
struct CodesAsStored {
  static constexpr int64_t kGroup = 16;
  template <int bits>
  using Activation = int8_t;
  template <int bits>
  static constexpr int32_t kZero = bits == 4 ? 8 : 128;
  template <int bits>
  static constexpr uint8_t kFlipped = 0;
  static int64_t byte_of(int64_t, int64_t i) { return i; }
};

// An instruction set's `Isa` has
//     kRows: rows of a tile;
//     kGroup: channels of a tile;
//     Activation<bits>: type of a rounded activation;
//     kZero<bits>: zero point of the codes as its tile reads them;
//     byte_of(bits, i): which of a channel's four bytes holds column i of four;
//     kFlipped<bits>: bits of a stored code to invert;
//     tile<bits, rows>(Tile).
template <class Isa>
struct Matmul {
  static constexpr int64_t kGroup = Isa::kGroup;
  template <int bits>
  using ActivationOf = typename Isa::template Activation<bits>;

  static int64_t activation_bytes(int64_t bits) {
    return bits == 4 ? sizeof(ActivationOf<4>) : sizeof(ActivationOf<8>);
  }

  static void pack(const PackedMatrix& m, const uint8_t* codes, const float* scales) {
    const int64_t row_bytes = m.padded() * m.bits / 8, step = m.bits == 4 ? 8 : 4;
    const uint8_t zero = m.bits == 4 ? 0x88 : 0x80;
    const auto at = [&](int64_t channel, int64_t column) -> uint8_t {
      if (channel >= m.channels) return zero;
      const uint8_t* row = codes + channel * row_bytes;
      return m.bits == 4 ? row[column / 2] >> (column % 2 * 4) & 15 : row[column];
    };
    uint8_t* out = m.codes;
    for (int64_t group = 0; group < m.groups(); ++group) {
      for (int64_t column = 0; column < m.padded(); column += step) {
        for (int64_t channel = group * kGroup; channel < (group + 1) * kGroup; ++channel, out += 4) {
          for (int64_t i = 0; i < 4; ++i) {
            uint8_t& byte = out[Isa::byte_of(m.bits, i)];
            byte = m.bits == 4 ? (at(channel, column + i) & 15) | at(channel, column + 4 + i) << 4
                               : at(channel, column + i) ^ Isa::template kFlipped<8>;
          }
        }
      }
    }
    uint8_t* to = m.scales;
    for (int64_t group = 0; group < m.groups(); ++group) {
      for (int64_t block = 0; block < m.blocks(); ++block) {
        for (int64_t channel = group * kGroup; channel < (group + 1) * kGroup; ++channel) {
          const uint32_t scale = channel < m.channels ? bits_as<uint32_t>(scales[channel * m.blocks() + block]) : 0;
          const uint16_t upper = static_cast<uint16_t>(scale >> 16);
          m.scales_are_short ? std::memcpy(to, &upper, 2) : std::memcpy(to, &scale, 4);
          to += m.scale_bytes();
        }
      }
    }
  }

  static void round(const PackedMatrix& m, const float* x, const RoundedRows& rows, int64_t first, int64_t last) {
    m.bits == 4 ? round_as<4>(m, x, rows, first, last) : round_as<8>(m, x, rows, first, last);
  }

  static void multiply(const PackedMatrix& m, const RoundedRows& rows, int64_t first, int64_t last, float* y) {
    m.bits == 4 ? multiply_as<4>(m, rows, first, last, y) : multiply_as<8>(m, rows, first, last, y);
  }

 private:
  template <int bits>
  static void round_as(const PackedMatrix& m, const float* x, const RoundedRows& rows, int64_t first, int64_t last) {
    using Activation = ActivationOf<bits>;
    for (int64_t row = first; row < last; ++row) {
      Activation* codes = reinterpret_cast<Activation*>(rows.codes) + row * m.padded();
      for (int64_t block = 0; block < m.blocks(); ++block) {
        const int64_t begin = block * m.block, count = smaller(m.block, m.width - begin);
        const int64_t i = block * rows.stride + row;
        const int32_t sum = round_block(x + row * m.width + begin, count, codes + begin, rows.scales[i]);
        for (int64_t k = count; k < m.block; ++k) codes[begin + k] = 0;
        rows.offsets[i] = -Isa::template kZero<bits> * sum;
      }
    }
  }

  // Codes of some activations, and their sum.
  template <class Activation>
  static int32_t round_block(const float* x, int64_t count, Activation* codes, float& scale) {
    // As whole numbers magnitudes are in order, infinity after all finite ones and NaN after infinity.
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = larger(largest, bits_as<int32_t>(x[i]) & 0x7fffffff);
    const float top = bits_as<float>(largest);
    // Less than this has no exact scale, and is taken for zero.
    const bool is_zero = top < 1e-36f;
    const float divisor = is_zero ? 1.0f : top / 127.0f;
    scale = is_zero ? 0.0f : divisor;
    // NaN and infinity have no code: they make every product with their row NaN.
    if (largest >= 0x7f800000) scale = __builtin_nanf("");
    // A quotient by the scale, as ONNX Runtime and `verify` have it: another way would break ties another way.
    // Added to 1.5 * 2^23 it loses its fraction, half to even, and stands in the sum's last bits.
    constexpr float kShift = 12582912.0f;
    const int32_t shift = bits_as<int32_t>(kShift);
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t code = largest >= 0x7f800000 || is_zero ? 0 : bits_as<int32_t>(x[i] / divisor + kShift) - shift;
      codes[i] = static_cast<Activation>(code);
      sum += code;
    }
    return sum;
  }

  template <int bits>
  static void multiply_as(const PackedMatrix& m, const RoundedRows& rows, int64_t first, int64_t last, float* y) {
    const int64_t row_bytes = m.padded() * sizeof(ActivationOf<bits>);
    alignas(64) float sums[Isa::kRows * kGroup];
    for (int64_t group = first; group < last; ++group) {
      const int64_t channel = group * kGroup, count = smaller(kGroup, m.channels - channel);
      for (int64_t row = 0; row < rows.rows; row += Isa::kRows) {
        const int64_t height = smaller<int64_t>(Isa::kRows, rows.rows - row);
        const Tile tile{m,
                        m.codes + group * m.group_bytes(),
                        m.scales + group * m.blocks() * kGroup * m.scale_bytes(),
                        rows.codes + row * row_bytes,
                        row_bytes,
                        rows.stride,
                        rows.scales + row,
                        rows.offsets + row,
                        sums};
        run<bits, Isa::kRows>(tile, height);
        for (int64_t i = 0; i < height; ++i) {
          copy_group(sums + i * kGroup, count, y + (row + i) * m.channels + channel);
        }
      }
    }
  }

  // Copies `count` floats, most often a whole group: a size known beforehand needs no call.
  static void copy_group(const float* from, int64_t count, float* to) {
    if (count == kGroup) return void(std::memcpy(to, from, kGroup * sizeof(float)));
    std::memcpy(to, from, count * sizeof(float));
  }

  // The tile of exactly `height` rows.
  template <int bits, int rows>
  static void run(const Tile& tile, int64_t height) {
    if constexpr (rows > 1) {
      if (height < rows) return run<bits, rows - 1>(tile, height);
    }
    Isa::template tile<bits, rows>(tile);
  }
};

template <class Isa>
constexpr MatmulKernel make_matmul(const char* name) {
  return {name, Isa::kGroup, 0, Matmul<Isa>::activation_bytes, Matmul<Isa>::pack, Matmul<Isa>::round, Matmul<Isa>::multiply};
}

}  // namespace
}  // namespace diffquant
