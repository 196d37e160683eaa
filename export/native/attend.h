// Differential attention, or attention with one map, of one block of rows, for any vector type.
//
// A block holds the logits of all keys it sees: memory is linear in S, K and V are each read once, and since both
// softmaxes are then known before V is read, V meets their difference in one product instead of one a map.
#pragma once

#include "problem.h"
#include "products.h"
#include "rows.h"
#include "scratch.h"
#include "softmax.h"

namespace diffquant {
namespace {

// Keys or values that are read at once, so that what is converted stays in a level-1 cache: whole tiles of every
// kernel for a tall panel, which uses them often; fewer for a flat one, which uses them once a row.
constexpr int64_t kTallRead = 48;
constexpr int64_t kFlatRead = 2000;  // floats, about
// Bytes of logits a block may hold before it is made of fewer rows; about half of a level-2 cache.
constexpr int64_t kLogitBytes = 512 << 10;
constexpr int64_t kMostRows = 64;
constexpr int64_t kAhead = 4;  // rows

struct KeyRange {
  int64_t first, end;
};

template <class V>
class BlockAttention {
  using Vec = typename V::Vec;

 public:
  BlockAttention(const Problem& problem, const Block& block)
      : problem_(problem),
        block_(block),
        tall_(block.rows > V::kLanes / 2),
        rows_(tall_ ? round_up(block.rows, V::kLanes) : block.rows),
        first_key_(seen_by(0).first),
        keys_(seen_by(block.rows - 1).end - first_key_),
        row_stride_(tall_ ? 1 : round_up(keys_, V::kLanes)),
        key_stride_(tall_ ? rows_ : 1),
        logits_of_map_(tall_ ? keys_ * rows_ : rows_ * row_stride_),
        read_rows_(tall_ ? kTallRead : round_up(kFlatRead / problem.keys.width + 1, V::kLanes)) {
    const int64_t widest = larger(problem.keys.width, problem.values.width);
    const int64_t buffer = read_rows_ * widest;
    Scratch& scratch = Scratch::of_this_thread();
    const int64_t maps = problem.maps;
    scratch.reset(maps * logits_of_map_ + maps * problem.width * rows_ + problem.values.width * rows_ + buffer +
                      widest + maps * problem.width * (1 + (tall_ ? V::kLanes : 1)) + 2 * rows_,
                  9);
    logits_ = scratch.take(maps * logits_of_map_);
    queries_ = scratch.take(maps * problem.width * rows_);
    sums_ = scratch.take(problem.values.width * rows_);
    buffer_ = scratch.take(buffer);
    angles_ = scratch.take(widest);
    staged_ = scratch.take(maps * problem.width * (tall_ ? V::kLanes : 1));
    key_scales_ = scratch.take(maps * problem.width);
    of_rows_ = scratch.take(rows_);
    gates_ = scratch.take(rows_);
  }

  // Largest |logit| of each row and map, [2][rows].
  void measure(float* largest) {
    prepare_logits();
    for (int map = 0; map < 2; ++map) {
      const float* of_map = magnitudes(map);
      for (int64_t row = 0; row < block_.rows; ++row) largest[map * block_.rows + row] = of_map[row];
    }
  }

  // Writes the block's rows of the output. `shared` is [B, h, 2] magnitudes, or null where no step spans rows.
  void attend(const float* shared) {
    if (problem_.logits.bits) {
      prepare_logits();
      for (int map = 0; map < 2; ++map) round_logits(map, shared);
    } else {
      multiply_keys();
    }
    hide(kHidden);
    weigh_keys();
    multiply_values();
    write_output();
  }

 private:
  int64_t token(int64_t row) const { return (block_.first_row + row) / problem_.group(); }
  int64_t pair(int64_t row) const {
    return block_.kv_pair * problem_.group() + (block_.first_row + row) % problem_.group();
  }
  // Where a row's λ, gates and output are, counted in pairs.
  int64_t index(int64_t row) const {
    return (block_.sequence * problem_.tokens + token(row)) * problem_.pairs + pair(row);
  }
  KeyRange seen_by(int64_t row) const {
    const int64_t end = problem_.start[block_.sequence] + token(row) + 1;
    return {larger<int64_t>(end - problem_.window, 0), end};
  }

  const uint8_t* query(int64_t row, int map) const {
    const int64_t token_of_batch = block_.sequence * problem_.tokens + token(row);
    const int64_t head = token_of_batch * problem_.query_heads() + problem_.query_head(pair(row), map);
    return row_at(problem_.query, problem_.activations, head, problem_.width);
  }

  // The logits as runs: a vector of rows each in a tall panel, a row each in a flat one.
  int64_t runs() const { return tall_ ? rows_ / V::kLanes : rows_; }
  Run run(int map, int64_t i) const {
    float* const of_map = logits_ + map * logits_of_map_;
    if (tall_) return {of_map + i * V::kLanes, keys_, key_stride_, false};
    return {of_map + i * row_stride_, row_stride_ / V::kLanes, V::kLanes, true};
  }
  // One number for each row of run i.
  Vec lanes(const float* of_rows, int64_t i) const {
    return tall_ ? V::load(of_rows + i * V::kLanes) : V::broadcast(of_rows[i]);
  }
  void store_lanes(float* of_rows, int64_t i, Vec x) const {
    if (tall_) return V::store(of_rows + i * V::kLanes, x);
    V::store_first(of_rows + i, x, 1);
  }

  // Queries rotated and scaled, [maps][width][rows] in a tall panel and [maps][rows][width] in a flat one. Whatever
  // multiplies a key channel's codes multiplies the query here instead, once.
  void gather_queries() {
    const int64_t width = problem_.width, both = problem_.maps * width, together = tall_ ? V::kLanes : 1;
    gather_key_scales();
    Rotation<V> rotation(problem_, angles_);
    for (int64_t first = 0; first < rows_; first += together) {
      for (int64_t i = 0; i < together; ++i) gather_query(first + i, rotation, staged_ + i * both);
      for (int map = 0; map < problem_.maps; ++map) {
        const float* from = staged_ + map * width;
        float* to = queries_ + map * width * rows_;
        if (tall_) {
          transpose_rows<V>(from, both, width, to + first, rows_);
        } else {
          std::memcpy(to + first * width, from, width * sizeof(float));
        }
      }
    }
  }

  void gather_query(int64_t row, Rotation<V>& rotation, float* to) {
    const int64_t width = problem_.width, both = problem_.maps * width;
    if (row >= block_.rows) return void(std::memset(to, 0, both * sizeof(float)));
    for (int map = 0; map < problem_.maps; ++map) {
      // Neighbouring rows of a block lie a page apart, where no processor looks ahead by itself.
      if (row + kAhead < block_.rows) prefetch(query(row + kAhead, map), width * sizeof(float));
      decode<V>(problem_.activations, query(row, map), width, to + map * width);
    }
    rotation.move_to(problem_.start[block_.sequence] + token(row));
    for (int64_t c = 0; c < both; c += problem_.keys.width) rotation.turn(to + c);
    for (int64_t c = 0; c < both; ++c) to[c] = to[c] * problem_.scale * key_scales_[c];
  }

  void gather_key_scales() {
    const float* scale = problem_.keys.scale_of(block_.kv_pair);
    for (int map = 0; map < problem_.maps; ++map) {
      for (int64_t c = 0; c < problem_.width; ++c) {
        key_scales_[map * problem_.width + c] = scale ? scale[problem_.key_offset(map) + c] : 1.0f;
      }
    }
  }

  void multiply_keys() {
    gather_queries();
    const int64_t width = problem_.width, stride = problem_.keys.width;
    for (int64_t first = 0; first < keys_; first += read_rows_) {
      const int64_t count = smaller(read_rows_, keys_ - first);
      const float* keys =
          read_rows<V>(problem_.keys, block_.sequence, block_.kv_pair, first_key_ + first, count, buffer_);
      for (int map = 0; map < problem_.maps; ++map) {
        const float* queries = queries_ + map * width * rows_;
        const float* of_map = keys + problem_.key_offset(map);
        float* logits = logits_ + map * logits_of_map_ + first * key_stride_;
        if (tall_) {
          tall_product<V>(queries, rows_, width, of_map, stride, count, logits);
        } else {
          flat_product<V>(queries, width, rows_, width, of_map, stride, count, logits, row_stride_);
        }
      }
    }
  }

  // Overwrites what each row does not see; in a flat panel also what fills its last vector.
  void hide(float with) {
    const int64_t padded = tall_ ? keys_ : row_stride_;
    for (int64_t row = 0; row < block_.rows; ++row) {
      const KeyRange seen = seen_by(row);
      for (int map = 0; map < problem_.maps; ++map) {
        float* logits = logits_ + map * logits_of_map_ + row * row_stride_;
        for (int64_t k = 0; k < seen.first - first_key_; ++k) logits[k * key_stride_] = with;
        for (int64_t k = seen.end - first_key_; k < padded; ++k) logits[k * key_stride_] = with;
      }
    }
  }

  // Logits ready to be rounded: hidden ones 0, the row's largest subtracted where the scheme shifts.
  void prepare_logits() {
    multiply_keys();
    if (problem_.logits.shift) {
      hide(kHidden);
      for (int map = 0; map < 2; ++map) {
        for (int64_t i = 0; i < runs(); ++i) subtract_top<V>(run(map, i));
      }
    }
    hide(0);
  }

  // Largest |logit| of each row of a map.
  float* magnitudes(int map) {
    for (int64_t i = 0; i < runs(); ++i) store_lanes(of_rows_, i, magnitude_of<V>(run(map, i)));
    return of_rows_;
  }

  void round_logits(int map, const float* shared) {
    const LogitScheme& scheme = problem_.logits;
    float* steps = magnitudes(map);
    for (int64_t row = 0; row < block_.rows; ++row) {
      const int64_t pair_of_batch = block_.sequence * problem_.pairs + pair(row);
      steps[row] = logit_step(shared ? shared[pair_of_batch * 2 + map] : steps[row], scheme);
    }
    for (int64_t row = block_.rows; row < rows_; ++row) steps[row] = 1;
    const float lowest = scheme.shift ? -static_cast<float>((1 << scheme.bits) - 1) : kHidden;
    for (int64_t i = 0; i < runs(); ++i) round_to_steps<V>(run(map, i), lanes(steps, i), lowest);
  }

  // Replaces logits by what the values of their keys weigh: one map's share, or both maps' difference.
  void weigh_keys() {
    if (problem_.maps == 1) {
      for (int64_t i = 0; i < runs(); ++i) normalize<V>(run(0, i));
      return;
    }
    gather_weights();
    for (int64_t i = 0; i < runs(); ++i) subtract_maps<V>(run(0, i), run(1, i), lanes(gates_, i), lanes(of_rows_, i));
  }

  // What multiplies each row's maps: the signal's gate, and λ.
  void gather_weights() {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at = row < block_.rows ? index(row) : 0;
      of_rows_[row] = problem_.lambda[problem_.lambda_per_pair ? at : 0];
      gates_[row] = problem_.signal_gate ? problem_.signal_gate[problem_.signal_gate_per_pair ? at : 0] : 1.0f;
    }
  }

  void multiply_values() {
    for (int64_t i = 0; i < rows_ * problem_.values.width; ++i) sums_[i] = 0;
    for (int64_t first = 0; first < keys_; first += read_rows_) {
      const int64_t count = smaller(read_rows_, keys_ - first);
      const float* values =
          read_rows<V>(problem_.values, block_.sequence, block_.kv_pair, first_key_ + first, count, buffer_);
      int64_t row = 0;
      if constexpr (V::kWeighedRows >= 8) row = weigh<8>(row, first, count, values);
      if constexpr (V::kWeighedRows >= 4) row = weigh<4>(row, first, count, values);
      row = weigh<2>(row, first, count, values);
      weigh<1>(row, first, count, values);
    }
  }

  // As many groups of `row_count` rows as there are from `row` on; returns the first row left.
  template <int row_count>
  int64_t weigh(int64_t row, int64_t first, int64_t count, const float* values) {
    for (; row + row_count <= block_.rows; row += row_count) {
      const int64_t seen = seen_by(row + row_count - 1).end - first_key_ - first;
      const Weights weights{logits_ + row * row_stride_ + first * key_stride_, row_stride_, key_stride_};
      weighed_rows<V, row_count>(weights, smaller(count, seen), values, problem_.values.width,
                                 sums_ + row * problem_.values.width);
    }
    return row;
  }

  void write_output() {
    const int64_t width = problem_.values.width;
    const float* scale = problem_.values.scale_of(block_.kv_pair);
    for (int64_t row = 0; row < block_.rows; ++row) {
      float* sums = sums_ + row * width;
      for (int64_t c = 0; scale && c < width; ++c) sums[c] *= scale[c];
      if (problem_.output_gate) {
        // `buffer_` is free once V has been read.
        decode<V>(problem_.activations, row_at(problem_.output_gate, problem_.activations, index(row), width), width,
                  buffer_);
        for (int64_t c = 0; c < width; ++c) sums[c] *= buffer_[c];
      }
      write_activations<V>(problem_.activations, sums, width,
                           row_at(problem_.output, problem_.activations, index(row), width));
    }
  }

  const Problem& problem_;
  const Block& block_;
  const bool tall_;
  const int64_t rows_;  // of the panel: whole vectors where it is tall
  const int64_t first_key_, keys_;
  const int64_t row_stride_, key_stride_, logits_of_map_;
  const int64_t read_rows_;
  float *logits_, *queries_, *sums_, *buffer_, *angles_, *staged_, *key_scales_, *of_rows_, *gates_;
};

template <class V>
void attend(const Problem& problem, const Block& block, const float* largest) {
  BlockAttention<V>(problem, block).attend(largest);
}

template <class V>
void measure(const Problem& problem, const Block& block, float* largest) {
  BlockAttention<V>(problem, block).measure(largest);
}

template <class V>
int64_t block_rows(const Problem& problem) {
  int64_t longest = 1;
  for (int64_t i = 0; i < problem.batch; ++i) longest = larger(longest, problem.length[i]);
  const int64_t fitting = kLogitBytes / (problem.maps * sizeof(float) * longest) / V::kLanes * V::kLanes;
  return larger<int64_t>(V::kLanes, smaller(kMostRows, fitting));
}

template <class V>
void append(const Problem& problem, int64_t sequence, int64_t first_token, int64_t tokens) {
  const Cache &keys = problem.keys, &values = problem.values;
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reset(2 * keys.width + values.width, 3);
  float* key = scratch.take(keys.width);
  float* value = scratch.take(values.width);
  Rotation<V> rotation(problem, scratch.take(keys.width));
  for (int64_t token = first_token; token < first_token + tokens; ++token) {
    const int64_t position = problem.start[sequence] + token;
    rotation.move_to(position);
    for (int64_t pair = 0; pair < problem.kv_pairs; ++pair) {
      const int64_t index = (sequence * problem.tokens + token) * problem.kv_pairs + pair;
      decode<V>(problem.activations, row_at(problem.key, problem.activations, index, keys.width), keys.width, key);
      rotation.turn(key);
      write_row<V>(keys, pair, key, keys.row(sequence, pair, position));
      decode<V>(problem.activations, row_at(problem.value, problem.activations, index, values.width), values.width,
                value);
      write_row<V>(values, pair, value, values.row(sequence, pair, position));
    }
  }
}

}  // namespace
}  // namespace diffquant
