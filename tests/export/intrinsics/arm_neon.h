// A model of the NEON intrinsics that the products of codes use, lane by lane as Arm's guide defines them, for
// processors of another kind.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

template <class T, int lanes>
struct Lanes {
  T lane[lanes];
};
using uint8x16_t = Lanes<uint8_t, 16>;
using int8x16_t = Lanes<int8_t, 16>;
using uint16x4_t = Lanes<uint16_t, 4>;
using int32x4_t = Lanes<int32_t, 4>;
using uint32x4_t = Lanes<uint32_t, 4>;
using float32x4_t = Lanes<float, 4>;

template <class To, class From>
inline To same_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline int8x16_t vreinterpretq_s8_u8(uint8x16_t a) { return same_bits<int8x16_t>(a); }
inline int8x16_t vreinterpretq_s8_s32(int32x4_t a) { return same_bits<int8x16_t>(a); }

inline uint8x16_t vld1q_u8(const uint8_t* from) {
  uint8x16_t out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline uint8x16_t vdupq_n_u8(uint8_t x) {
  uint8x16_t out;
  std::memset(&out, x, sizeof out);
  return out;
}
inline uint8x16_t vandq_u8(uint8x16_t a, uint8x16_t b) {
  for (int i = 0; i < 16; ++i) a.lane[i] &= b.lane[i];
  return a;
}
inline uint8x16_t vshrq_n_u8(uint8x16_t a, int count) {
  for (uint8_t& x : a.lane) x = static_cast<uint8_t>(x >> count);
  return a;
}

inline int32x4_t vdupq_n_s32(int32_t x) { return {{x, x, x, x}}; }
inline int32x4_t vdotq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
  for (int i = 0; i < 16; ++i) sum.lane[i / 4] += a.lane[i] * b.lane[i];
  return sum;
}

inline uint16x4_t vld1_u16(const uint16_t* from) { return {{from[0], from[1], from[2], from[3]}}; }
inline uint32x4_t vshll_n_u16(uint16x4_t a, int count) {
  uint32x4_t out;
  for (int i = 0; i < 4; ++i) out.lane[i] = static_cast<uint32_t>(a.lane[i]) << count;
  return out;
}
inline float32x4_t vreinterpretq_f32_u32(uint32x4_t a) { return same_bits<float32x4_t>(a); }

inline float32x4_t vdupq_n_f32(float x) { return {{x, x, x, x}}; }
inline float32x4_t vld1q_f32(const float* from) { return {{from[0], from[1], from[2], from[3]}}; }
inline void vst1q_f32(float* to, float32x4_t x) { std::memcpy(to, &x, sizeof x); }
inline float32x4_t vcvtq_f32_s32(int32x4_t a) {
  float32x4_t out;
  for (int i = 0; i < 4; ++i) out.lane[i] = static_cast<float>(a.lane[i]);
  return out;
}
inline float32x4_t vmulq_n_f32(float32x4_t a, float b) {
  for (float& x : a.lane) x *= b;
  return a;
}
inline float32x4_t vfmaq_f32(float32x4_t sum, float32x4_t a, float32x4_t b) {
  for (int i = 0; i < 4; ++i) sum.lane[i] = std::fma(a.lane[i], b.lane[i], sum.lane[i]);
  return sum;
}
