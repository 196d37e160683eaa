// The two matrix products of attention, in tiles that stay in registers.
#pragma once

#include "scalar.h"

namespace diffquant {
namespace {

// Tall products put rows in the lanes: one register holds a channel of kLanes rows, and a key's channel is
// broadcast to all. No key is ever transposed. Flat ones, for a few rows, put channels in the lanes and sum at the end.

// logits[key][row] of `key_count` keys and `row_vectors` · kLanes rows; queries are [width][stride].
template <class V, int row_vectors, int key_count>
inline void tall_tile(const float* queries, int64_t stride, int64_t width, const float* keys, int64_t key_stride,
                      float* logits) {
  typename V::Vec sum[key_count][row_vectors];
#pragma GCC unroll 32
  for (int k = 0; k < key_count; ++k)
#pragma GCC unroll 4
    for (int r = 0; r < row_vectors; ++r) sum[k][r] = V::broadcast(0);
  for (int64_t c = 0; c < width; ++c) {
    typename V::Vec query[row_vectors];
#pragma GCC unroll 4
    for (int r = 0; r < row_vectors; ++r) query[r] = V::load(queries + c * stride + r * V::kLanes);
#pragma GCC unroll 32
    for (int k = 0; k < key_count; ++k) {
      const typename V::Vec key = V::broadcast(keys[k * key_stride + c]);
#pragma GCC unroll 4
      for (int r = 0; r < row_vectors; ++r) sum[k][r] = V::fma(key, query[r], sum[k][r]);
    }
  }
#pragma GCC unroll 32
  for (int k = 0; k < key_count; ++k)
#pragma GCC unroll 4
    for (int r = 0; r < row_vectors; ++r) V::store(logits + k * stride + r * V::kLanes, sum[k][r]);
}

template <class V, int row_vectors>
void tall_strip(const float* queries, int64_t stride, int64_t width, const float* keys, int64_t key_stride,
                int64_t count, float* logits) {
  constexpr int kTile = V::kAccumulators / row_vectors;
  int64_t k = 0;
  for (; k + kTile <= count; k += kTile) {
    tall_tile<V, row_vectors, kTile>(queries, stride, width, keys + k * key_stride, key_stride, logits + k * stride);
  }
  for (; k < count; ++k) {
    tall_tile<V, row_vectors, 1>(queries, stride, width, keys + k * key_stride, key_stride, logits + k * stride);
  }
}

// logits[key][row] of `count` keys and `rows` rows, a multiple of kLanes; queries are [width][rows].
template <class V>
void tall_product(const float* queries, int64_t rows, int64_t width, const float* keys, int64_t key_stride,
                  int64_t count, float* logits) {
  constexpr int64_t kStrip = V::kRowVectors * V::kLanes;
  int64_t r = 0;
  for (; r + kStrip <= rows; r += kStrip) {
    tall_strip<V, V::kRowVectors>(queries + r, rows, width, keys, key_stride, count, logits + r);
  }
  for (; r < rows; r += V::kLanes) {
    tall_strip<V, 1>(queries + r, rows, width, keys, key_stride, count, logits + r);
  }
}

// Logits of one row and kLanes keys.
template <class V>
inline typename V::Vec flat_tile(const float* query, int64_t width, const float* const (&keys)[V::kLanes]) {
  typename V::Vec sum[V::kLanes];
#pragma GCC unroll 16
  for (int k = 0; k < V::kLanes; ++k) sum[k] = V::broadcast(0);
  int64_t c = 0;
  for (; c + V::kLanes <= width; c += V::kLanes) {
    const typename V::Vec part = V::load(query + c);
#pragma GCC unroll 16
    for (int k = 0; k < V::kLanes; ++k) sum[k] = V::fma(part, V::load(keys[k] + c), sum[k]);
  }
  if (c < width) {
    const typename V::Vec part = V::load_first(query + c, width - c);
#pragma GCC unroll 16
    for (int k = 0; k < V::kLanes; ++k) sum[k] = V::fma(part, V::load_first(keys[k] + c, width - c), sum[k]);
  }
  return V::sum_each(sum);
}

// logits[row][key]; `logits` has room for whole vectors, whose last lanes repeat the last key.
template <class V>
void flat_product(const float* queries, int64_t query_stride, int64_t rows, int64_t width, const float* keys,
                  int64_t key_stride, int64_t count, float* logits, int64_t row_stride) {
  for (int64_t k = 0; k < count; k += V::kLanes) {
    const float* tile[V::kLanes];
    for (int i = 0; i < V::kLanes; ++i) tile[i] = keys + smaller(k + i, count - 1) * key_stride;
    for (int64_t row = 0; row < rows; ++row) {
      V::store(logits + row * row_stride + k, flat_tile<V>(queries + row * query_stride, width, tile));
    }
  }
}

// Weights of some rows and keys, at data[row · row_stride + key · key_stride].
struct Weights {
  const float* data;
  int64_t row_stride, key_stride;
};

// out[row][column] += weights[row][key] · values[key][column], of `row_count` rows and `column_vectors` vectors of
// columns.
template <class V, int row_count, int column_vectors>
inline void weighed_tile(const Weights& weights, int64_t keys, const float* values, int64_t value_stride, float* out,
                         int64_t out_stride) {
  typename V::Vec sum[row_count][column_vectors];
#pragma GCC unroll 8
  for (int r = 0; r < row_count; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < column_vectors; ++c) sum[r][c] = V::load(out + r * out_stride + c * V::kLanes);
  const float* weight = weights.data;
  for (int64_t k = 0; k < keys; ++k, values += value_stride, weight += weights.key_stride) {
    typename V::Vec value[column_vectors];
#pragma GCC unroll 8
    for (int c = 0; c < column_vectors; ++c) value[c] = V::load(values + c * V::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < row_count; ++r) {
      const typename V::Vec each = V::broadcast(weight[r * weights.row_stride]);
#pragma GCC unroll 8
      for (int c = 0; c < column_vectors; ++c) sum[r][c] = V::fma(each, value[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < row_count; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < column_vectors; ++c) V::store(out + r * out_stride + c * V::kLanes, sum[r][c]);
}

// The last columns, fewer than kLanes, of one row.
template <class V>
void weighed_rest(const Weights& weights, int64_t keys, const float* values, int64_t value_stride, int64_t columns,
                  float* out) {
  typename V::Vec sum = V::load_first(out, columns);
  for (int64_t k = 0; k < keys; ++k) {
    sum = V::fma(V::broadcast(weights.data[k * weights.key_stride]), V::load_first(values + k * value_stride, columns),
                 sum);
  }
  V::store_first(out, sum, columns);
}

template <class V, int row_count>
void weighed_rows(const Weights& weights, int64_t keys, const float* values, int64_t width, float* out) {
  constexpr int kWide = smaller(8, V::kWeighedRows * 2 / row_count);
  int64_t c = 0;
  for (; c + kWide * V::kLanes <= width; c += kWide * V::kLanes) {
    weighed_tile<V, row_count, kWide>(weights, keys, values + c, width, out + c, width);
  }
  for (; c + V::kLanes <= width; c += V::kLanes) {
    weighed_tile<V, row_count, 1>(weights, keys, values + c, width, out + c, width);
  }
  if (c == width) return;
  for (int r = 0; r < row_count; ++r) {
    const Weights row{weights.data + r * weights.row_stride, weights.row_stride, weights.key_stride};
    weighed_rest<V>(row, keys, values + c, width, width - c, out + r * width + c);
  }
}

}  // namespace
}  // namespace diffquant
