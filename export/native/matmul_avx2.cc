#include <immintrin.h>

#include <type_traits>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

struct Avx2Matmul : CodesAsStored {
  static constexpr int kRows = 4;
  // Codes of 8 bits times int8 do not fit the sums of 16 bits that AVX2 makes of bytes: both become int16.
  template <int bits>
  using Activation = std::conditional_t<bits == 4, int8_t, int16_t>;
  // At 8 bits the even bytes hold the first two columns, the odd ones the others.
  static int64_t byte_of(int64_t bits, int64_t i) { return bits == 4 ? i : i / 2 + i % 2 * 2; }

  template <int bits, int rows>
  static void tile(const Tile& t) {
    if constexpr (bits == 4) {
      t.matrix.block == 16 ? tile4<rows, 2>(t) : tile4<rows, 4>(t);
    } else {
      tile8<rows>(t);
    }
  }

 private:
  // `steps` times eight columns are summed in 16 bits: 32 columns of at most 15 * 127 in pairs just fit.
  template <int rows, int steps>
  static void tile4(const Tile& t) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const int64_t spans = t.matrix.block / (8 * steps);
    const uint8_t* codes = t.codes;
    const uint8_t* activations = t.activations;
    __m256 sums[rows][2];
    for (auto& row : sums) row[0] = row[1] = _mm256_setzero_ps();
    for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
      __m256i whole[rows][2];
      for (int r = 0; r < rows; ++r) whole[r][0] = whole[r][1] = offset(t, r, block);
      for (int64_t span = 0; span < spans; ++span, codes += 64 * steps, activations += 8 * steps) {
        __m256i part[rows][2];
        for (auto& row : part) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int step = 0; step < steps; ++step) {
          const uint8_t* x = activations + 8 * step;
          const __m256i a = load(codes + 64 * step), b = load(codes + 64 * step + 32);
          add_bytes(part, _mm256_and_si256(a, low), _mm256_and_si256(b, low), x, t.row_bytes);
          add_bytes(part, _mm256_and_si256(_mm256_srli_epi16(a, 4), low),
                       _mm256_and_si256(_mm256_srli_epi16(b, 4), low), x + 4, t.row_bytes);
        }
        for (int r = 0; r < rows; ++r) {
          for (int i = 0; i < 2; ++i) {
            whole[r][i] = _mm256_add_epi32(whole[r][i], _mm256_madd_epi16(part[r][i], ones));
          }
        }
      }
      add_block<rows>(t, block, whole, sums);
    }
    store<rows>(t, sums);
  }

  template <int rows>
  DIFFQUANT_INLINE static void add_bytes(__m256i (&part)[rows][2], __m256i a, __m256i b, const uint8_t* x,
                                            int64_t row_bytes) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m256i four = four_bytes(x + r * row_bytes);
      part[r][0] = _mm256_add_epi16(part[r][0], _mm256_maddubs_epi16(a, four));
      part[r][1] = _mm256_add_epi16(part[r][1], _mm256_maddubs_epi16(b, four));
      keep_order(part[r]);
    }
  }

  template <int rows>
  DIFFQUANT_INLINE static void add_words(__m256i (&whole)[rows][2], __m256i a, __m256i b, const uint8_t* x,
                                         int64_t row_bytes) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const __m256i two = four_bytes(x + r * row_bytes);
      whole[r][0] = _mm256_add_epi32(whole[r][0], _mm256_madd_epi16(a, two));
      whole[r][1] = _mm256_add_epi32(whole[r][1], _mm256_madd_epi16(b, two));
      keep_order(whole[r]);
    }
  }

  // Sums in another order would need more registers than there are.
  DIFFQUANT_INLINE static void keep_order(__m256i (&sums)[2]) { asm("" : "+x"(sums[0]), "+x"(sums[1])); }

  template <int rows>
  static void tile8(const Tile& t) {
    const __m256i low = _mm256_set1_epi16(255);
    const uint8_t* codes = t.codes;
    const uint8_t* activations = t.activations;
    __m256 sums[rows][2];
    for (auto& row : sums) row[0] = row[1] = _mm256_setzero_ps();
    for (int64_t block = 0; block < t.matrix.blocks(); ++block) {
      __m256i whole[rows][2];
      for (int r = 0; r < rows; ++r) whole[r][0] = whole[r][1] = offset(t, r, block);
      for (int64_t k = 0; k < t.matrix.block; k += 4, codes += 64, activations += 8) {
        const __m256i a = load(codes), b = load(codes + 32);
        add_words(whole, _mm256_and_si256(a, low), _mm256_and_si256(b, low), activations, t.row_bytes);
        add_words(whole, _mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8), activations + 4, t.row_bytes);
      }
      add_block<rows>(t, block, whole, sums);
    }
    store<rows>(t, sums);
  }

  template <int rows>
  static void add_block(const Tile& t, int64_t block, const __m256i (&whole)[rows][2], __m256 (&sums)[rows][2]) {
    const __m256 scales[2] = {scales_from(t, block * kGroup), scales_from(t, block * kGroup + 8)};
    for (int r = 0; r < rows; ++r) {
      const __m256 scale = _mm256_set1_ps(t.activation_scales[block * t.all_rows + r]);
      for (int i = 0; i < 2; ++i) {
        sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r][i]), _mm256_mul_ps(scale, scales[i]), sums[r][i]);
      }
    }
  }

  template <int rows>
  static void store(const Tile& t, const __m256 (&sums)[rows][2]) {
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < 2; ++i) _mm256_store_ps(t.sums + r * kGroup + i * 8, sums[r][i]);
    }
  }

  static __m256 scales_from(const Tile& t, int64_t i) {
    if (!t.matrix.scales_are_short) return _mm256_load_ps(reinterpret_cast<const float*>(t.scales) + i);
    const __m128i upper = _mm_load_si128(reinterpret_cast<const __m128i*>(t.scales + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16));
  }
  static __m256i offset(const Tile& t, int64_t row, int64_t block) {
    return _mm256_set1_epi32(t.offsets[block * t.all_rows + row]);
  }
  static __m256i load(const uint8_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }
  static __m256i four_bytes(const uint8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return _mm256_set1_epi32(word);
  }
};

}  // namespace

extern const MatmulKernel kAvx2Matmul = make_matmul<Avx2Matmul>("avx2");

}  // namespace diffquant
