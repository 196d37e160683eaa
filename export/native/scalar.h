// Numbers one at a time: what the vectors leave over, and what is not worth vectors.
// All of it has internal linkage: translation units are compiled for different processors and must not share code.
#pragma once

#include <cstdint>
#include <cstring>

namespace diffquant {
namespace {

template <class T>
constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Nearest whole number, ties to even, of |x| below 2^22: adding 1.5·2^23 leaves no bits for a fraction.
inline float round_half_even(float x) {
  constexpr float kMagic = 12582912.0f;
  return x + kMagic - kMagic;
}

inline float power_of_two(int32_t n) { return bits_as<float>(static_cast<uint32_t>(n + 127) << 23); }

inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // The exponent's bias differs by 112: a multiplication moves it and gives subnormals their value too.
  return bits_as<float>(sign | bits_as<uint32_t>(bits_as<float>(rest << 13) * 0x1p112f));
}

inline uint16_t half_of_float(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 aligns the fraction so that the addition rounds it, ties to even.
    return sign | static_cast<uint16_t>(bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000);
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + odd) >> 13);
}

// Code i of a row of codes of `bits` bits, least significant bit first.
inline int packed_code(const uint8_t* row, int64_t i, int bits) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit % 8);
  unsigned window = row[bit / 8];
  if (shift + bits > 8) window |= static_cast<unsigned>(row[bit / 8 + 1]) << 8;
  return static_cast<int>(window >> shift & ((1u << bits) - 1)) - (1 << (bits - 1));
}

}  // namespace
}  // namespace diffquant
