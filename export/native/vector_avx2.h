// Eight floats in AVX2 registers. Every processor with AVX2 and FMA also converts halves (F16C).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace diffquant {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 12;  // registers for sums in a tile
  static constexpr int kRowVectors = 2;    // of a tall tile
  static constexpr int kWeighedRows = 4;

  using Vec = __m256;

  static Vec broadcast(float x) { return _mm256_set1_ps(x); }
  static Vec load(const float* from) { return _mm256_loadu_ps(from); }
  static Vec load_first(const float* from, int64_t count) { return _mm256_maskload_ps(from, first(count)); }
  static void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
  static void store_first(float* to, Vec x, int64_t count) { _mm256_maskstore_ps(to, first(count), x); }

  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  // b where one is NaN.
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x·2^n for whole n of -126 to 0.
  static Vec scale_by_power(Vec x, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  // x, but 0 where `a` is at most `bound`.
  static Vec unless_at_most(Vec a, Vec bound, Vec x) {
    return _mm256_andnot_ps(_mm256_cmp_ps(a, bound, _CMP_LE_OQ), x);
  }

  static float largest(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static float sum(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  // Lane i of the result is the sum of the lanes of each[i].
  static Vec sum_each(const Vec (&each)[kLanes]) {
    const Vec low = sum_quarters(each[0], each[1], each[2], each[3]);
    const Vec high = sum_quarters(each[4], each[5], each[6], each[7]);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }

  // to[column][row] of kLanes rows and columns.
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    Vec columns[2][4];  // of four rows each: half k of column j has column 4k + j
    for (int i = 0; i < 2; ++i) {
      const float* rows = from + 4 * i * stride;
      const Vec a = load(rows), b = load(rows + stride), c = load(rows + 2 * stride), d = load(rows + 3 * stride);
      const __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
      const __m256d cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
      columns[i][0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
      columns[i][1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
      columns[i][2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high));
      columns[i][3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high));
    }
    for (int j = 0; j < 4; ++j) {
      store(to + j * to_stride, _mm256_permute2f128_ps(columns[0][j], columns[1][j], 0x20));
      store(to + (4 + j) * to_stride, _mm256_permute2f128_ps(columns[0][j], columns[1][j], 0x31));
    }
  }

  static Vec load_half(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_half(uint16_t* to, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vec load_int8(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  // kLanes codes of `bits` bits that begin at a byte: each lane takes the two bytes its code lies in.
  template <int bits>
  static Vec load_packed(const uint8_t* from) {
    static_assert(bits == 4 || bits == 6, "loads are of 4 and 6 bytes");
    uint64_t word = load_as<uint32_t>(from);
    if constexpr (bits == 6) word |= uint64_t{load_as<uint16_t>(from + 4)} << 32;
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(word)), pairs<bits>());
    const __m256i shifts = _mm256_setr_epi32(0, bits % 8, 2 * bits % 8, 3 * bits % 8, 4 * bits % 8, 5 * bits % 8,
                                             6 * bits % 8, 7 * bits % 8);
    const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), _mm256_set1_epi32((1 << bits) - 1));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(1 << (bits - 1))));
  }

 private:
  static __m256i first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  template <class T>
  static T load_as(const uint8_t* from) {
    T out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }
  // In each half: the sums of that half of a, b, c and d.
  static Vec sum_quarters(Vec a, Vec b, Vec c, Vec d) {
    const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  }
  // Shuffle control that puts bytes i·bits/8 and the next into the low half of lane i.
  template <int bits>
  static __m256i pairs() {
    constexpr auto at = [](int i) { return static_cast<int>(0x80800000u | (i * bits / 8 + 1) << 8 | i * bits / 8); };
    return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
  }
};

}  // namespace
}  // namespace diffquant
