// A model of the AVX-512 and AMX intrinsics that the products of codes use, lane by lane as Intel's guide defines them, for
// processors that lack the instructions. It hides the compiler's own header where its folder is searched first.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __m512i {
  int32_t lane[16];
};
struct __m256i {
  uint16_t lane[16];
};
struct __m512 {
  float lane[16];
};

template <class Vector, class Function>
inline Vector each_lane(Function function) {
  Vector out;
  for (int i = 0; i < 16; ++i) out.lane[i] = function(i);
  return out;
}

inline __m512i _mm512_load_si512(const void* from) {
  __m512i out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline __m512i _mm512_set1_epi32(int32_t x) {
  return each_lane<__m512i>([=](int) { return x; });
}
inline __m512i _mm512_set1_epi8(int8_t x) { return _mm512_set1_epi32(static_cast<uint8_t>(x) * 0x01010101); }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return each_lane<__m512i>([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  uint16_t words[32];
  std::memcpy(words, &a, sizeof words);
  for (uint16_t& word : words) word = static_cast<uint16_t>(word >> count);
  return _mm512_load_si512(words);
}
inline __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  uint8_t bytes[64], less[64];
  std::memcpy(bytes, &a, 64);
  std::memcpy(less, &b, 64);
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(bytes[i] - less[i]);
  return _mm512_load_si512(bytes);
}
inline void _mm512_store_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
// The first operand's bytes are unsigned, the second's signed; nothing saturates.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  uint8_t unsigned_bytes[64];
  int8_t signed_bytes[64];
  std::memcpy(unsigned_bytes, &a, 64);
  std::memcpy(signed_bytes, &b, 64);
  return each_lane<__m512i>([&](int i) {
    int32_t out = sum.lane[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) out += unsigned_bytes[j] * signed_bytes[j];
    return out;
  });
}

inline __m256i _mm256_load_si256(const __m256i* from) { return *from; }
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return each_lane<__m512i>([&](int i) { return a.lane[i]; });
}
inline __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return each_lane<__m512i>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) << count); });
}
inline __m512 _mm512_castsi512_ps(__m512i a) {
  __m512 out;
  std::memcpy(&out, &a, sizeof out);
  return out;
}

inline __m512 _mm512_load_ps(const float* from) {
  return each_lane<__m512>([=](int i) { return from[i]; });
}
inline void _mm512_store_ps(float* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
using __mmask16 = uint16_t;
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
  return each_lane<__m512>([=](int i) { return mask >> i & 1 ? from[i] : 0; });
}
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) to[i] = x.lane[i];
  }
}
inline __m512 _mm512_set1_ps(float x) {
  return each_lane<__m512>([=](int) { return x; });
}
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0); }
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return each_lane<__m512>([&](int i) { return static_cast<float>(a.lane[i]); });
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return each_lane<__m512>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return each_lane<__m512>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}

// The tiles of a thread: eight of at most 16 rows of 64 bytes, and as many of them as the configuration says.
struct TileState {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
  int8_t bytes[8][16][64];
};
inline TileState& tile_state() {
  thread_local TileState state{};
  return state;
}
inline void _tile_loadconfig(const void* from) {
  tile_state() = {};
  std::memcpy(&tile_state(), from, 64);
}
inline void _tile_release() { tile_state() = {}; }
inline void _tile_zero(int tile) { std::memset(tile_state().bytes[tile], 0, sizeof tile_state().bytes[tile]); }
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  TileState& state = tile_state();
  _tile_zero(tile);
  for (int r = 0; r < state.rows[tile]; ++r) {
    std::memcpy(state.bytes[tile][r], static_cast<const uint8_t*>(from) + r * stride, state.row_bytes[tile]);
  }
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
  const TileState& state = tile_state();
  for (int r = 0; r < state.rows[tile]; ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, state.bytes[tile][r], state.row_bytes[tile]);
  }
}
// A row of b holds four of the bytes that a row of a is multiplied by, for each sum of 32 bits; all are signed.
inline void _tile_dpbssd(int sums, int a, int b) {
  TileState& state = tile_state();
  for (int r = 0; r < state.rows[sums]; ++r) {
    for (int column = 0; column < state.row_bytes[sums] / 4; ++column) {
      int32_t sum;
      std::memcpy(&sum, state.bytes[sums][r] + 4 * column, 4);
      for (int k = 0; k < state.row_bytes[a]; ++k) sum += state.bytes[a][r][k] * state.bytes[b][k / 4][4 * column + k % 4];
      std::memcpy(state.bytes[sums][r] + 4 * column, &sum, 4);
    }
  }
}
