// Rows of numbers in and out of their storage: activations, caches, rotation.
#pragma once

#include "problem.h"
#include "scalar.h"

namespace diffquant {
namespace {

inline float decode_one(Storage storage, const uint8_t* row, int64_t i) {
  switch (storage) {
    case Storage::kFloat: return reinterpret_cast<const float*>(row)[i];
    case Storage::kHalf: return float_of_half(reinterpret_cast<const uint16_t*>(row)[i]);
    case Storage::kInt8: return static_cast<float>(reinterpret_cast<const int8_t*>(row)[i]);
    case Storage::kPacked6: return static_cast<float>(packed_code(row, i, 6));
    case Storage::kPacked4: return static_cast<float>(packed_code(row, i, 4));
  }
  return 0;
}

template <class V>
typename V::Vec decode_lanes(Storage storage, const uint8_t* row, int64_t i) {
  const uint8_t* at = row + i * storage_bits(storage) / 8;
  switch (storage) {
    case Storage::kFloat: break;
    case Storage::kHalf: return V::load_half(reinterpret_cast<const uint16_t*>(at));
    case Storage::kInt8: return V::load_int8(at);
    case Storage::kPacked6: return V::template load_packed<6>(at);
    case Storage::kPacked4: return V::template load_packed<4>(at);
  }
  return V::load(reinterpret_cast<const float*>(at));
}

// Numbers of a row, codes as they are.
template <class V, Storage storage>
void decode_as(const uint8_t* row, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store(to + i, decode_lanes<V>(storage, row, i));
  for (; i < count; ++i) to[i] = decode_one(storage, row, i);
}

template <class V>
void decode(Storage storage, const void* row, int64_t count, float* to) {
  const uint8_t* bytes = static_cast<const uint8_t*>(row);
  switch (storage) {
    case Storage::kFloat: return decode_as<V, Storage::kFloat>(bytes, count, to);
    case Storage::kHalf: return decode_as<V, Storage::kHalf>(bytes, count, to);
    case Storage::kInt8: return decode_as<V, Storage::kInt8>(bytes, count, to);
    case Storage::kPacked6: return decode_as<V, Storage::kPacked6>(bytes, count, to);
    case Storage::kPacked4: return decode_as<V, Storage::kPacked4>(bytes, count, to);
  }
}

inline void prefetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Row `index` of a dense matrix of activations.
inline const uint8_t* row_at(const void* matrix, Storage storage, int64_t index, int64_t width) {
  return static_cast<const uint8_t*>(matrix) + index * width * storage_bits(storage) / 8;
}
inline uint8_t* row_at(void* matrix, Storage storage, int64_t index, int64_t width) {
  return static_cast<uint8_t*>(matrix) + index * width * storage_bits(storage) / 8;
}

// Consecutive rows of a cache as floats: in place where they are floats, else through `buffer`. Rows are dense, so
// that they convert as one.
template <class V>
const float* read_rows(const Cache& cache, int64_t sequence, int64_t kv_pair, int64_t first, int64_t count,
                       float* buffer) {
  const uint8_t* row = cache.row(sequence, kv_pair, first);
  if (cache.storage == Storage::kFloat) return reinterpret_cast<const float*>(row);
  decode<V>(cache.storage, row, count * cache.width, buffer);
  return buffer;
}

template <class V>
void write_halves(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store_half(to + i, V::load(from + i));
  for (; i < count; ++i) to[i] = half_of_float(from[i]);
}

template <class V>
void write_activations(Storage storage, const float* from, int64_t count, uint8_t* to) {
  if (storage == Storage::kHalf) return write_halves<V>(from, count, reinterpret_cast<uint16_t*>(to));
  std::memcpy(to, from, count * sizeof(float));
}

// Codes of x in place: round-half-even(x / scale), clamped to the format's, of which the lowest
// is the largest one's negative: -2^(bits-1) is never stored.
inline void to_codes(float* x, const float* scale, int64_t count, int bits) {
  const float largest = static_cast<float>((1 << (bits - 1)) - 1);
  for (int64_t i = 0; i < count; ++i) {
    // Clamped first: the bounds are whole numbers, and the rounding is good for small numbers only.
    x[i] = round_half_even(smaller(larger(x[i] / scale[i], -largest), largest));
  }
}

inline void write_packed(const float* codes, int64_t count, int bits, uint8_t* to) {
  uint32_t pending = 0;
  int held = 0;
  for (int64_t i = 0; i < count; ++i) {
    pending |= static_cast<uint32_t>(static_cast<int>(codes[i]) + (1 << (bits - 1))) << held;
    for (held += bits; held >= 8; held -= 8, pending >>= 8) *to++ = static_cast<uint8_t>(pending);
  }
}

// Stores one row in a cache; `row` is used up.
template <class V>
void write_row(const Cache& cache, int64_t kv_pair, float* row, uint8_t* to) {
  if (cache.storage == Storage::kFloat || cache.storage == Storage::kHalf) {
    return write_activations<V>(cache.storage, row, cache.width, to);
  }
  const int bits = storage_bits(cache.storage);
  to_codes(row, cache.scale_of(kv_pair), cache.width, bits);
  if (bits < 8) return write_packed(row, cache.width, bits, to);
  for (int64_t i = 0; i < cache.width; ++i) to[i] = static_cast<uint8_t>(static_cast<int8_t>(row[i]));
}

// to[column][row] of kLanes rows, which lie `stride` floats apart, and `width` columns.
template <class V>
void transpose_rows(const float* from, int64_t stride, int64_t width, float* to, int64_t to_stride) {
  int64_t c = 0;
  for (; c + V::kLanes <= width; c += V::kLanes) V::transpose(from + c, stride, to + c * to_stride, to_stride);
  for (; c < width; ++c) {
    for (int64_t row = 0; row < V::kLanes; ++row) to[c * to_stride + row] = from[row * stride + c];
  }
}

inline void rotate_one(float* a, float* b, float cos, float sin) {
  const float turned = *a * cos - *b * sin;
  *b = *a * sin + *b * cos;
  *a = turned;
}

// Cosines and sines of one position.
template <class V>
class Rotation {
 public:
  // `buffer` holds `width` floats, a key row's width.
  Rotation(const Problem& problem, float* buffer)
      : problem_(problem), half_(problem.keys.width / 2), cos_(buffer), sin_(buffer + half_) {}

  void move_to(int64_t position) {
    if (!problem_.cos || position == position_) return;
    position_ = position;
    decode<V>(problem_.activations, row_at(problem_.cos, problem_.activations, position, half_), half_, cos_);
    decode<V>(problem_.activations, row_at(problem_.sin, problem_.activations, position, half_), half_, sin_);
  }

  // Turns a row as wide as a key row.
  void turn(float* row) const {
    if (!problem_.cos) return;
    if (problem_.interleaved) {
      for (int64_t i = 0; i < half_; ++i) rotate_one(row + 2 * i, row + 2 * i + 1, cos_[i], sin_[i]);
    } else {
      for (int64_t i = 0; i < half_; ++i) rotate_one(row + i, row + i + half_, cos_[i], sin_[i]);
    }
  }

 private:
  const Problem& problem_;
  int64_t half_, position_ = -1;
  float *cos_, *sin_;
};

}  // namespace
}  // namespace diffquant
