// Sixteen float32 values at once, and products of bfloat16 pairs that are summed in float32: by AVX-512 BF16 where the
// compiler may use it, else by AVX2 and FMA. Both round alike; sums of pairs may differ in their last bit, since
// AVX-512's do not keep denormals. `count` is how many of the sixteen count, from the first; others are zero.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
using Pair = uint32_t;  // two bfloat16 that are neighbours along the axis that a product sums over

#ifdef __AVX512BF16__

using Vec = __m512;
using Pairs = __m512i;
using Narrow = __m256i;  // sixteen bfloat16

constexpr int kRegisters = 32;

Vec all(float x) { return _mm512_set1_ps(x); }
Vec load(const float* p) { return _mm512_loadu_ps(p); }
void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
__mmask16 first(long count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }
Vec kept(Vec x, long count, float rest = 0) { return _mm512_mask_mov_ps(all(rest), first(count), x); }

Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// Where one is NaN, the second.
Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x · 2^n, of whole n from -126 to 127.
Vec times_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
float largest(Vec x) { return _mm512_reduce_max_ps(x); }
float summed(Vec x) { return _mm512_reduce_add_ps(x); }

Vec widened(Narrow x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
Narrow narrowed(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x); }
Vec load(const bf16* p, long count) { return widened(_mm256_maskz_loadu_epi16(first(count), p)); }
void store(bf16* p, Vec x, long count) { _mm256_mask_storeu_epi16(p, first(count), narrowed(x)); }

Pairs load_pairs(const Pair* p) { return _mm512_loadu_si512(p); }
void store_pairs(Pair* p, Pairs x) { _mm512_storeu_si512(p, x); }
Pairs paired(Narrow low, Narrow high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
// What the pairs of `right` are multiplied by, one pair for all; and sum + its products.
struct Left {
  __m512i both;
};
using Right = Pairs;
Left left_of(const Pair* p) { return {_mm512_set1_epi32(*p)}; }
Right right_of(Pairs x) { return x; }
Vec multiplied(Vec sum, Left left, Right right) { return _mm512_dpbf16_ps(sum, (__m512bh)left.both, (__m512bh)right); }

#else

struct Vec {
  __m256 low, high;
};
struct Pairs {
  __m256i low, high;
};
using Narrow = __m256i;

constexpr int kRegisters = 16;

Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
void store(float* p, Vec x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
Vec kept(Vec x, long count, float rest = 0) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i some = _mm256_set1_epi32(count >= 16 ? 16 : count <= 0 ? 0 : (int)count);
  __m256 low = (__m256)_mm256_cmpgt_epi32(some, lane);
  __m256 high = (__m256)_mm256_cmpgt_epi32(some, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
  return {_mm256_blendv_ps(_mm256_set1_ps(rest), x.low, low), _mm256_blendv_ps(_mm256_set1_ps(rest), x.high, high)};
}

Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
Vec divide(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
Vec fms(Vec a, Vec b, Vec c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }
Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
Vec larger(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
Vec smaller(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
__m256 nearest(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
Vec nearest(Vec x) { return {nearest(x.low), nearest(x.high)}; }
__m256 power(__m256 n) {
  return (__m256)_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
}
// A NaN in n meets one in x.
Vec times_power(Vec x, Vec n) { return {_mm256_mul_ps(x.low, power(n.low)), _mm256_mul_ps(x.high, power(n.high))}; }
// In AVX-512's order: halves with each other, until one is left.
float largest(Vec x) {
  __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ps(two, _mm_movehdup_ps(two)));
}
float summed(Vec x) {
  __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ps(two, _mm_movehdup_ps(two)));
}

__m256 widened(__m128i x) { return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
Vec widened(Narrow x) { return {widened(_mm256_castsi256_si128(x)), widened(_mm256_extracti128_si256(x, 1))}; }
// bfloat16 in the low half of each; half way is rounded to even, a NaN stays one.
__m256i narrowed(__m256 x) {
  __m256i bits = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, (__m256i)_mm256_cmp_ps(x, x, _CMP_UNORD_Q)), 16);
}
Narrow narrowed(Vec x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrowed(x.low), narrowed(x.high)), 0b11011000);
}
Vec load(const bf16* p, long count) {
  bf16 some[16] = {};
  memcpy(some, p, sizeof(bf16) * (count >= 16 ? 16 : count));
  return widened(_mm256_loadu_si256((const __m256i*)some));
}
void store(bf16* p, Vec x, long count) {
  bf16 some[16];
  _mm256_storeu_si256((__m256i*)some, narrowed(x));
  memcpy(p, some, sizeof(bf16) * (count >= 16 ? 16 : count));
}

Pairs load_pairs(const Pair* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
void store_pairs(Pair* p, Pairs x) {
  _mm256_storeu_si256((__m256i*)p, x.low), _mm256_storeu_si256((__m256i*)(p + 8), x.high);
}
__m256i paired(__m128i low, __m128i high) {
  return _mm256_or_si256(_mm256_cvtepu16_epi32(low), _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16));
}
Pairs paired(Narrow low, Narrow high) {
  return {paired(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high)),
          paired(_mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1))};
}
// Both of a pair in float32.
struct Left {
  __m256 first, second;
};
struct Right {
  Vec first, second;
};
__m256 firsts(__m256i x) { return (__m256)_mm256_slli_epi32(x, 16); }
__m256 seconds(__m256i x) { return (__m256)_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000)); }
Left left_of(const Pair* p) {
  __m256i both = _mm256_set1_epi32(*p);
  return {firsts(both), seconds(both)};
}
Right right_of(Pairs x) { return {{firsts(x.low), firsts(x.high)}, {seconds(x.low), seconds(x.high)}}; }
Vec multiplied(Vec sum, Left left, Right right) {
  return fma({left.first, left.first}, right.first, fma({left.second, left.second}, right.second, sum));
}

#endif

Narrow load_narrow(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
Vec load(const bf16* p) { return widened(load_narrow(p)); }
void store(bf16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrowed(x)); }

}  // namespace
