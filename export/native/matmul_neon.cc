#include <arm_neon.h>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

// NEON with the dot products of Armv8.2, which multiply signed bytes: codes of 8 bits are read less 128.
struct NeonMatmul : CodesAsStored {
  static constexpr int kRows = 4;
  static constexpr int kParts = kGroup / 4;
  template <int bits>
  static constexpr int32_t kZero = bits == 4 ? 8 : 0;
  template <int bits>
  static constexpr uint8_t kFlipped = bits == 4 ? 0 : 0x80;

  template <int bits, int rows>
  static void tile(const Tile& t) {
    const uint8_t* codes = t.codes;
    const uint8_t* activations = t.activations;
    constexpr int kStep = bits == 4 ? 8 : 4;
    float32x4_t sums[rows][kParts];
    for (auto& row : sums) {
      for (auto& part : row) part = vdupq_n_f32(0);
    }
    for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
      int32x4_t whole[rows][kParts];
      for (int r = 0; r < rows; ++r) {
        for (auto& part : whole[r]) part = vdupq_n_s32(t.offsets[block * t.all_rows + r]);
      }
      for (int64_t k = 0; k < t.matrix.block; k += kStep, codes += 64, activations += kStep) {
        int8x16_t four[rows][2];
        for (int r = 0; r < rows; ++r) {
          for (int i = 0; i < kStep / 4; ++i) four[r][i] = four_bytes(activations + r * t.row_bytes + 4 * i);
        }
        for (int i = 0; i < kParts; ++i) {
          const uint8x16_t stored = vld1q_u8(codes + 16 * i);
          if constexpr (bits == 4) {
            const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(stored, vdupq_n_u8(15)));
            const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(stored, 4));
            for (int r = 0; r < rows; ++r) {
              whole[r][i] = vdotq_s32(vdotq_s32(whole[r][i], low, four[r][0]), high, four[r][1]);
            }
          } else {
            for (int r = 0; r < rows; ++r) {
              whole[r][i] = vdotq_s32(whole[r][i], vreinterpretq_s8_u8(stored), four[r][0]);
            }
          }
        }
      }
      for (int r = 0; r < rows; ++r) {
        const float scale = t.activation_scales[block * t.all_rows + r];
        for (int i = 0; i < kParts; ++i) {
          const float32x4_t scales = vmulq_n_f32(scales_from(t, block * kGroup + 4 * i), scale);
          sums[r][i] = vfmaq_f32(sums[r][i], vcvtq_f32_s32(whole[r][i]), scales);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < kParts; ++i) vst1q_f32(t.sums + r * kGroup + 4 * i, sums[r][i]);
    }
  }

 private:
  static float32x4_t scales_from(const Tile& t, int64_t i) {
    if (!t.matrix.scales_are_short) return vld1q_f32(reinterpret_cast<const float*>(t.scales) + i);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(t.scales) + i), 16));
  }
  static int8x16_t four_bytes(const uint8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
  }
};

}  // namespace

extern const MatmulKernel kNeonMatmul = make_matmul<NeonMatmul>("neon");

}  // namespace diffquant
