#include <immintrin.h>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

struct VnniMatmul : CodesAsStored {
  // Twelve chains of products hide the four cycles of each, and their sums as floats fill the other registers. Two
  // vectors of channels share an activation's broadcast, which would else take all that a core can load.
  static constexpr int kRows = 6;
  static constexpr int kVectors = 2;
  static constexpr int64_t kGroup = 16 * kVectors;

  template <int bits, int rows>
  static void tile(const Tile& t) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* codes = t.codes;
    const uint8_t* activations = t.activations;
    constexpr int kStep = bits == 4 ? 8 : 4;
    __m512 sums[rows][kVectors];
    for (auto& row : sums) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
    for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
      __m512i whole[rows][kVectors];
      for (int r = 0; r < rows; ++r) {
        for (auto& sum : whole[r]) sum = _mm512_set1_epi32(t.offsets[block * t.all_rows + r]);
      }
      for (int64_t k = 0; k < t.matrix.block; k += kStep, codes += 4 * kGroup, activations += kStep) {
        __m512i a[kVectors];
        for (int i = 0; i < kVectors; ++i) a[i] = _mm512_load_si512(reinterpret_cast<const void*>(codes + 64 * i));
        if constexpr (rows > 1) {
          // The processor itself reads ahead where codes are all that arrives, for a single row.
          for (int i = 0; i < kVectors; ++i) __builtin_prefetch(codes + 64 * i + kAhead);
        }
        if constexpr (bits == 4) {
          __m512i half[kVectors];
          for (int i = 0; i < kVectors; ++i) half[i] = _mm512_and_si512(a[i], low);
          add_bytes(whole, half, activations, t.row_bytes);
          for (int i = 0; i < kVectors; ++i) half[i] = _mm512_and_si512(_mm512_srli_epi16(a[i], 4), low);
          add_bytes(whole, half, activations + 4, t.row_bytes);
        } else {
          add_bytes(whole, a, activations, t.row_bytes);
        }
      }
      for (int i = 0; i < kVectors; ++i) {
        const __m512 scales = scales_from(t, block * kGroup + 16 * i);
        for (int r = 0; r < rows; ++r) {
          const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(t.activation_scales[block * t.all_rows + r]), scales);
          sums[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][i]), scale, sums[r][i]);
        }
      }
    }
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < kVectors; ++i) _mm512_store_ps(t.sums + r * kGroup + 16 * i, sums[r][i]);
    }
  }

 private:
  static constexpr int64_t kAhead = 4096;  // bytes: a page

  static __m512 scales_from(const Tile& t, int64_t i) {
    if (!t.matrix.scales_are_short) return _mm512_load_ps(reinterpret_cast<const float*>(t.scales) + i);
    const __m256i upper = _mm256_load_si256(reinterpret_cast<const __m256i*>(t.scales + 2 * i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
  }

  template <int rows>
  DIFFQUANT_INLINE static void add_bytes(__m512i (&whole)[rows][kVectors], const __m512i (&a)[kVectors],
                                         const uint8_t* x, int64_t row_bytes) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * row_bytes, sizeof four);
      const __m512i b = _mm512_set1_epi32(four);
      for (int i = 0; i < kVectors; ++i) {
        whole[r][i] = _mm512_dpbusd_epi32(whole[r][i], a[i], b);
        keep_in_place(whole[r][i]);
      }
    }
  }

  // Otherwise g++ gives each sum of a step another register, and moves them all back.
  DIFFQUANT_INLINE static void keep_in_place(__m512i& sum) {
#if defined(__AVX512F__)
    asm("" : "+v"(sum));
#else
    static_cast<void>(sum);
#endif
  }
};

}  // namespace

extern const MatmulKernel kVnniMatmul = make_matmul<VnniMatmul>("avx512vnni");

}  // namespace diffquant
