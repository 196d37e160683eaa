// Sixteen floats in AVX-512 registers (F, BW, DQ and VL).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diffquant {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 24;  // registers for sums in a tile
  static constexpr int kRowVectors = 4;    // of a tall tile
  static constexpr int kWeighedRows = 8;

  using Vec = __m512;

  static Vec broadcast(float x) { return _mm512_set1_ps(x); }
  static Vec load(const float* from) { return _mm512_loadu_ps(from); }
  static Vec load_first(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
  static void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
  static void store_first(float* to, Vec x, int64_t count) { _mm512_mask_storeu_ps(to, first(count), x); }

  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  // b where one is NaN.
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static Vec abs(Vec a) { return _mm512_abs_ps(a); }
  static Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x·2^n for whole n of -126 to 0.
  static Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
  // x, but 0 where `a` is at most `bound`.
  static Vec unless_at_most(Vec a, Vec bound, Vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, bound, _CMP_NLE_UQ), x);
  }

  static float largest(Vec a) { return _mm512_reduce_max_ps(a); }
  static float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  // Lane i of the result is the sum of the lanes of each[i].
  static Vec sum_each(const Vec (&each)[kLanes]) {
    Vec quarters[4];
    for (int i = 0; i < 4; ++i) {
      quarters[i] = sum_quarters(each[4 * i], each[4 * i + 1], each[4 * i + 2], each[4 * i + 3]);
    }
    return sum_neighbours(sum_neighbours(quarters[0], quarters[1]), sum_neighbours(quarters[2], quarters[3]));
  }

  // to[column][row] of kLanes rows and columns.
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    Vec columns[4][4];  // of four rows each: quarter k of column j has column 4k + j
    for (int i = 0; i < 4; ++i) {
      const float* rows = from + 4 * i * stride;
      const Vec a = load(rows), b = load(rows + stride), c = load(rows + 2 * stride), d = load(rows + 3 * stride);
      const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
      const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
      columns[i][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
      columns[i][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
      columns[i][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
      columns[i][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
    }
    for (int j = 0; j < 4; ++j) {
      const Vec low = _mm512_shuffle_f32x4(columns[0][j], columns[1][j], 0x44);
      const Vec high = _mm512_shuffle_f32x4(columns[0][j], columns[1][j], 0xee);
      const Vec low_rest = _mm512_shuffle_f32x4(columns[2][j], columns[3][j], 0x44);
      const Vec high_rest = _mm512_shuffle_f32x4(columns[2][j], columns[3][j], 0xee);
      store(to + j * to_stride, _mm512_shuffle_f32x4(low, low_rest, 0x88));
      store(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(low, low_rest, 0xdd));
      store(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(high, high_rest, 0x88));
      store(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(high, high_rest, 0xdd));
    }
  }

  static Vec load_half(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store_half(uint16_t* to, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vec load_int8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  // kLanes codes of `bits` bits that begin at a byte: each lane takes the two bytes its code lies in.
  template <int bits>
  static Vec load_packed(const uint8_t* from) {
    static_assert(bits == 4 || bits == 6, "loads are of 8 and 12 bytes");
    __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    if constexpr (bits == 6) row = _mm_insert_epi32(row, load_int32(from + 8), 2);
    const __m512i bytes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), pairs<bits>());
    const __m512i shifts = _mm512_and_si512(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(bits)),
        _mm512_set1_epi32(7));
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(bytes, shifts), _mm512_set1_epi32((1 << bits) - 1));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(1 << (bits - 1))));
  }

 private:
  static __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static int load_int32(const uint8_t* from) {
    int out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }
  // In each quarter: the sums of that quarter of a, b, c and d.
  static Vec sum_quarters(Vec a, Vec b, Vec c, Vec d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  // Quarters 0 + 1 and 2 + 3 of a, then of b.
  static Vec sum_neighbours(Vec a, Vec b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  // Shuffle control that puts bytes i·bits/8 and the next into the low half of lane i.
  template <int bits>
  static __m512i pairs() {
    constexpr auto at = [](int i) { return static_cast<int>(0x80800000u | (i * bits / 8 + 1) << 8 | i * bits / 8); };
    return _mm512_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11),
                             at(12), at(13), at(14), at(15));
  }
};

}  // namespace
}  // namespace diffquant
