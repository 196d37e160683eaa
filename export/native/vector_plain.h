// Eight floats in portable C++; the compiler vectorises the loops with whatever the target has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "scalar.h"

namespace diffquant {
namespace {

struct Plain {
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 4;  // registers for sums in a tile
  static constexpr int kRowVectors = 2;    // of a tall tile
  static constexpr int kWeighedRows = 2;

  struct Vec {
    float lane[kLanes];
  };

  template <class Function>
  static Vec map(Function function) {
    Vec out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = function(i);
    return out;
  }

  static Vec broadcast(float x) {
    return map([=](int) { return x; });
  }
  static Vec load(const float* from) {
    return map([=](int i) { return from[i]; });
  }
  static Vec load_first(const float* from, int64_t count) {
    return map([=](int i) { return i < count ? from[i] : 0.0f; });
  }
  static void store(float* to, const Vec& x) { std::memcpy(to, x.lane, sizeof x.lane); }
  static void store_first(float* to, const Vec& x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = x.lane[i];
  }

  static Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static Vec add(const Vec& a, const Vec& b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vec sub(const Vec& a, const Vec& b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Vec mul(const Vec& a, const Vec& b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vec div(const Vec& a, const Vec& b) {
    return map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  // b where one is NaN.
  static Vec max(const Vec& a, const Vec& b) {
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Vec abs(const Vec& a) {
    return map([&](int i) { return std::fabs(a.lane[i]); });
  }
  static Vec round(const Vec& a) {
    return map([&](int i) { return round_half_even(a.lane[i]); });
  }
  // x·2^n for whole n of -126 to 0.
  static Vec scale_by_power(const Vec& x, const Vec& n) {
    // The comparison is false for NaN, which has no whole number.
    return map([&](int i) { return x.lane[i] * power_of_two(n.lane[i] < 0 ? static_cast<int32_t>(n.lane[i]) : 0); });
  }
  // x, but 0 where `a` is at most `bound`.
  static Vec unless_at_most(const Vec& a, const Vec& bound, const Vec& x) {
    return map([&](int i) { return a.lane[i] <= bound.lane[i] ? 0.0f : x.lane[i]; });
  }

  static float largest(const Vec& a) {
    float out = a.lane[0];
    for (int i = 1; i < kLanes; ++i) out = a.lane[i] > out ? a.lane[i] : out;
    return out;
  }
  static float sum(const Vec& a) {
    float out = 0;
    for (float x : a.lane) out += x;
    return out;
  }
  // Lane i of the result is the sum of the lanes of each[i].
  static Vec sum_each(const Vec (&each)[kLanes]) {
    return map([&](int i) { return sum(each[i]); });
  }

  // to[column][row] of kLanes rows and columns.
  static void transpose(const float* from, int64_t stride, float* to, int64_t to_stride) {
    for (int64_t i = 0; i < kLanes * kLanes; ++i) to[i / kLanes * to_stride + i % kLanes] = from[i % kLanes * stride + i / kLanes];
  }

  static Vec load_half(const uint16_t* from) {
    return map([=](int i) { return float_of_half(from[i]); });
  }
  static void store_half(uint16_t* to, const Vec& x) {
    for (int i = 0; i < kLanes; ++i) to[i] = half_of_float(x.lane[i]);
  }
  static Vec load_int8(const uint8_t* from) {
    return map([=](int i) { return static_cast<float>(static_cast<int8_t>(from[i])); });
  }
  // kLanes codes of `bits` bits that begin at a byte.
  template <int bits>
  static Vec load_packed(const uint8_t* from) {
    uint64_t word = 0;
    std::memcpy(&word, from, bits);
    return map([=](int i) {
      return static_cast<float>(static_cast<int>(word >> (i * bits) & ((1 << bits) - 1)) - (1 << (bits - 1)));
    });
  }
};

}  // namespace
}  // namespace diffquant
