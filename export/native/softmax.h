// Softmax of one map, or of both and their difference, and simulated low-bit logits before it.
#pragma once

#include <initializer_list>
#include <limits>

#include "problem.h"
#include "scalar.h"

namespace diffquant {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Vectors of logits, `stride` floats apart. In a tall panel each lane is a row; in a flat one all lanes and
// vectors are one row's.
struct Run {
  float* data;
  int64_t count, stride;
  bool one_row;
};

template <class V>
typename V::Vec exponential(typename V::Vec x) {
  using Vec = typename V::Vec;
  const Vec lowest = V::broadcast(-87.0f);
  const Vec bounded = V::max(lowest, x);
  const Vec power = V::round(V::mul(bounded, V::broadcast(1.44269504f)));
  // ln 2 in two parts, so that the remainder loses nothing.
  Vec rest = V::fma(power, V::broadcast(-0.693359375f), bounded);
  rest = V::fma(power, V::broadcast(2.12194440e-4f), rest);
  // A minimax polynomial of (e^r - 1 - r) / r² on |r| <= ln 2 / 2 (Cephes).
  Vec sum = V::broadcast(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = V::fma(sum, rest, V::broadcast(coefficient));
  }
  sum = V::fma(sum, V::mul(rest, rest), V::add(rest, V::broadcast(1.0f)));
  // Hidden logits must weigh exactly nothing; NaN stays what it is.
  return V::unless_at_most(x, lowest, V::scale_by_power(sum, power));
}

template <class V>
typename V::Vec top_of(const Run& run) {
  typename V::Vec top = V::broadcast(kHidden);
  for (int64_t i = 0; i < run.count; ++i) top = V::max(top, V::load(run.data + i * run.stride));
  return run.one_row ? V::broadcast(V::largest(top)) : top;
}

// Replaces logits by e^(logit - largest) and returns their sum.
template <class V>
typename V::Vec exponentiate(const Run& run) {
  const typename V::Vec top = top_of<V>(run);
  typename V::Vec sum = V::broadcast(0);
  for (int64_t i = 0; i < run.count; ++i) {
    float* at = run.data + i * run.stride;
    const typename V::Vec weight = exponential<V>(V::sub(V::load(at), top));
    sum = V::add(sum, weight);
    V::store(at, weight);
  }
  return run.one_row ? V::broadcast(V::sum(sum)) : sum;
}

// gate·softmax(signal) - λ·softmax(noise), in the signal's place. Both maps' sums are known before V is read, so V is
// multiplied once, by the difference, and not once a map.
template <class V>
void subtract_maps(const Run& signal, const Run& noise, typename V::Vec gate, typename V::Vec lambda) {
  const typename V::Vec plus = V::div(gate, exponentiate<V>(signal));
  const typename V::Vec minus = V::div(V::sub(V::broadcast(0), lambda), exponentiate<V>(noise));
  for (int64_t i = 0; i < signal.count; ++i) {
    float* at = signal.data + i * signal.stride;
    V::store(at, V::fma(V::load(at), plus, V::mul(V::load(noise.data + i * noise.stride), minus)));
  }
}

// softmax(logits), in their place.
template <class V>
void normalize(const Run& logits) {
  const typename V::Vec share = V::div(V::broadcast(1), exponentiate<V>(logits));
  for (int64_t i = 0; i < logits.count; ++i) {
    float* at = logits.data + i * logits.stride;
    V::store(at, V::mul(V::load(at), share));
  }
}

template <class V>
void subtract_top(const Run& run) {
  const typename V::Vec top = top_of<V>(run);
  for (int64_t i = 0; i < run.count; ++i) {
    float* at = run.data + i * run.stride;
    V::store(at, V::sub(V::load(at), top));
  }
}

// Largest |logit| of each lane, or of all lanes in each.
template <class V>
typename V::Vec magnitude_of(const Run& run) {
  typename V::Vec largest = V::broadcast(0);
  for (int64_t i = 0; i < run.count; ++i) largest = V::max(largest, V::abs(V::load(run.data + i * run.stride)));
  return run.one_row ? V::broadcast(V::largest(largest)) : largest;
}

// Scale for a largest magnitude. exp(-12) is 6e-6: what lies further below the maximum weighs nothing.
inline float logit_step(float largest, const LogitScheme& scheme) {
  const float codes = static_cast<float>(scheme.shift ? (1 << scheme.bits) - 1 : (1 << (scheme.bits - 1)) - 1);
  const float step = (scheme.shift ? smaller(largest, 12.0f) : largest) / codes;
  return step == 0 ? 1.0f : step;
}

// Rounds logits to multiples of `step`; absmax codes cannot overflow, shifted ones end at `lowest`.
template <class V>
void round_to_steps(const Run& run, typename V::Vec step, float lowest) {
  const typename V::Vec bound = V::broadcast(lowest);
  for (int64_t i = 0; i < run.count; ++i) {
    float* at = run.data + i * run.stride;
    V::store(at, V::mul(V::round(V::max(bound, V::div(V::load(at), step))), step));
  }
}

}  // namespace
}  // namespace diffquant
