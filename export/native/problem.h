// One call of the op, as plain pointers and sizes. Letters as in docs/differential-attention-op.md.
#pragma once

#include <cstdint>

// Code of this header is compiled for several processors; inlining it everywhere keeps the linker from choosing one.
#define DIFFQUANT_INLINE __attribute__((always_inline)) inline

namespace diffquant {

// How numbers are stored; a cache may be any of them, activations are float or half.
enum class Storage { kFloat, kHalf, kInt8, kPacked6, kPacked4 };

DIFFQUANT_INLINE int storage_bits(Storage storage) {
  switch (storage) {
    case Storage::kFloat: return 32;
    case Storage::kHalf: return 16;
    case Storage::kInt8: return 8;
    case Storage::kPacked6: return 6;
    case Storage::kPacked4: return 4;
  }
  return 0;
}

// Keys or values of all sequences, [B, h_kv, rows, width].
struct Cache {
  Storage storage;
  int64_t kv_pairs, rows, width;
  uint8_t* data;
  const float* scale;  // [h_kv, width]; null unless codes are stored

  DIFFQUANT_INLINE int64_t row_bytes() const { return width * storage_bits(storage) / 8; }
  DIFFQUANT_INLINE uint8_t* row(int64_t batch, int64_t kv_pair, int64_t index) const {
    return data + ((batch * kv_pairs + kv_pair) * rows + index) * row_bytes();
  }
  DIFFQUANT_INLINE const float* scale_of(int64_t kv_pair) const { return scale ? scale + kv_pair * width : nullptr; }
};

enum class Granularity { kRow, kHead, kPair, kTensor };

// Simulated logit quantization; 0 bits leaves the logits alone.
struct LogitScheme {
  int64_t bits;
  Granularity granularity;
  bool shift;
};

struct Problem {
  int64_t batch, tokens, pairs, kv_pairs;
  int64_t maps;         // 2, or 1 where heads stand in the place of pairs
  int64_t signals;      // pairs that share a noise head; every head where there is one map and so no noise head
  int64_t width;        // d, of one map's query and key
  bool shared_keys;     // generation 2: both maps read the same key
  Storage activations;  // of query, key, value, cos, sin and output
  const void *query, *key, *value;
  const float* lambda;
  bool lambda_per_pair;  // [B, T, h], else [1]
  const float* signal_gate;  // what multiplies the signal map's output; null for 1
  bool signal_gate_per_pair;  // [B, T, h], else [1]
  const void* output_gate;  // [B, T, h, dv], what multiplies the output; null for 1
  const void *cos, *sin;  // null without rotation
  bool interleaved;
  float scale;
  int64_t window;  // newest keys a query sees
  LogitScheme logits;
  Cache keys, values;
  const int64_t* start;   // position of each sequence's first new token
  const int64_t* length;  // its tokens after this call
  void* output;

  DIFFQUANT_INLINE int64_t group() const { return pairs / kv_pairs; }
  DIFFQUANT_INLINE int64_t key_offset(int map) const { return shared_keys ? 0 : map * width; }
  DIFFQUANT_INLINE int64_t query_heads() const { return maps == 2 ? pairs + pairs / signals : pairs; }
  // Head of a token's query that holds a pair's map: its signal heads and then its noise head stand for each noise map.
  DIFFQUANT_INLINE int64_t query_head(int64_t pair, int map) const {
    return pair / signals * (signals + 1) + (map ? signals : pair % signals);
  }
  DIFFQUANT_INLINE int64_t new_tokens(int64_t sequence) const { return length[sequence] - start[sequence]; }
};

// Queries that are computed together: rows first_row to first_row + rows of one KV pair, where row i is
// token i / group and the group's pair i % group.
struct Block {
  int64_t sequence, kv_pair, first_row, rows;
};

// The kernel for one instruction set.
struct Kernel {
  const char* name;
  // Writes the keys and values of some new tokens into the caches.
  void (*append)(const Problem&, int64_t sequence, int64_t first_token, int64_t tokens);
  // How many rows a block should have.
  int64_t (*block_rows)(const Problem&);
  // Largest |logit| of each row and map of a block, into [2][rows].
  void (*measure)(const Problem&, const Block&, float* largest);
  // A block's rows of the output. `largest` is [B, h, 2]: what rows share where a logit step spans them, else null.
  void (*attend)(const Problem&, const Block&, const float* largest);
};

extern const Kernel kPlainKernel;
#if defined(__x86_64__)
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
#endif

}  // namespace diffquant
