#include <immintrin.h>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

struct VnniMatmul : CodesAsStored {
  // As many chains of products as hide the four cycles of each.
  static constexpr int kRows = 12;

  template <int bits, int rows>
  static void tile(const Tile& t) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* codes = t.codes;
    const uint8_t* activations = t.activations;
    constexpr int kStep = bits == 4 ? 8 : 4;
    __m512 sums[rows];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
      __m512i whole[rows];
      for (int r = 0; r < rows; ++r) whole[r] = _mm512_set1_epi32(t.offsets[r * t.matrix.blocks() + block]);
      for (int64_t k = 0; k < t.matrix.block; k += kStep, codes += 64, activations += kStep) {
        const __m512i a = _mm512_load_si512(reinterpret_cast<const void*>(codes));
        if constexpr (bits == 4) {
          add_bytes(whole, _mm512_and_si512(a, low), activations, t.row_bytes);
          add_bytes(whole, _mm512_and_si512(_mm512_srli_epi16(a, 4), low), activations + 4, t.row_bytes);
        } else {
          add_bytes(whole, a, activations, t.row_bytes);
        }
      }
      const __m512 scales = _mm512_load_ps(t.scales + block * kGroup);
      for (int r = 0; r < rows; ++r) {
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(t.activation_scales[r * t.matrix.blocks() + block]), scales);
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r]), scale, sums[r]);
      }
    }
    for (int r = 0; r < rows; ++r) _mm512_store_ps(t.sums + r * kGroup, sums[r]);
  }

 private:
  template <int rows>
  DIFFQUANT_INLINE static void add_bytes(__m512i (&whole)[rows], __m512i a, const uint8_t* x, int64_t row_bytes) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * row_bytes, sizeof four);
      whole[r] = _mm512_dpbusd_epi32(whole[r], a, _mm512_set1_epi32(four));
    }
  }
};

}  // namespace

extern const MatmulKernel kVnniMatmul = make_matmul<VnniMatmul>("avx512vnni");

}  // namespace diffquant
