#include "matmul_kernel.h"

namespace diffquant {
namespace {

// The twin of the others: the formula, one code after the other.
struct PlainMatmul : CodesAsStored {
  static constexpr int kRows = 1;

  template <int bits, int rows>
  static void tile(const Tile& t) {
    const auto* activations = reinterpret_cast<const int8_t*>(t.activations);
    for (int64_t channel = 0; channel < kGroup; ++channel) {
      float sum = 0;
      for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
        int32_t product = t.offsets[block * t.all_rows];
        for (int64_t k = block * t.matrix.block; k < (block + 1) * t.matrix.block; ++k) {
          product += activations[k] * code<bits>(t.codes, channel, k);
        }
        const float scale = t.activation_scales[block * t.all_rows] * scale_at(t, block * kGroup + channel);
        sum = __builtin_fmaf(static_cast<float>(product), scale, sum);
      }
      t.sums[channel] = sum;
    }
  }

 private:
  static float scale_at(const Tile& t, int64_t i) {
    uint32_t scale = 0;
    const int64_t bytes = t.matrix.scale_bytes();
    std::memcpy(reinterpret_cast<uint8_t*>(&scale) + 4 - bytes, t.scales + i * bytes, bytes);
    return bits_as<float>(scale);
  }

  template <int bits>
  static int32_t code(const uint8_t* codes, int64_t channel, int64_t k) {
    constexpr int64_t kStep = bits == 4 ? 8 : 4;
    const uint8_t byte = codes[(k / kStep * kGroup + channel) * 4 + k % 4];
    return bits == 8 ? byte : byte >> (k % 8 / 4 * 4) & 15;
  }
};

}  // namespace

extern const MatmulKernel kPlainMatmul = make_matmul<PlainMatmul>("plain");

}  // namespace diffquant
