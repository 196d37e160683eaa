#include <immintrin.h>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

// Intel's matrix unit beside AVX-512 VNNI, whose order of codes and rounded rows it shares: it multiplies sixteen rows
// by sixteen channels, and VNNI the products with so few rows that a tile is no gain.
constexpr int64_t kRows = 16, kChannels = 16, kGroup = 32;
constexpr int64_t kFewest = 32;
// Of more rows at once, products of 1,024 were slower than VNNI's in some processes.
constexpr int64_t kMost = 64;
// Columns whose expanded codes and activations lie in a first-level cache together.
constexpr int64_t kSpan = 768;
// Blocks that a product waits for its scales, and how many wait at once.
constexpr int64_t kBehind = 3, kHeld = 4;
constexpr int64_t kAhead = 4096;  // bytes of codes that are fetched early: a page

using Products = int32_t[kRows * kChannels];

// Half of the unit's tiles: a product, activations and codes. Their numbers are part of the instructions.
template <bool odd>
struct Tiles {
  DIFFQUANT_INLINE static void zero() {
    if constexpr (odd) _tile_zero(1); else _tile_zero(0);
  }
  DIFFQUANT_INLINE static void load_activations(const uint8_t* from, int64_t row_bytes) {
    if constexpr (odd) _tile_loadd(3, from, row_bytes); else _tile_loadd(2, from, row_bytes);
  }
  DIFFQUANT_INLINE static void load_codes(const uint8_t* from) {
    if constexpr (odd) _tile_loadd(5, from, 4 * kChannels); else _tile_loadd(4, from, 4 * kChannels);
  }
  DIFFQUANT_INLINE static void multiply() {
    if constexpr (odd) _tile_dpbssd(1, 3, 5); else _tile_dpbssd(0, 2, 4);
  }
  DIFFQUANT_INLINE static void store(Products& to) {
    if constexpr (odd) _tile_stored(1, to, 4 * kChannels); else _tile_stored(0, to, 4 * kChannels);
  }
};

// What LDTILECONFIG reads.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Makes g++ finish what it writes: it does not know that the tiles' instructions read memory.
DIFFQUANT_INLINE void finish_writes() { asm volatile("" ::: "memory"); }

void configure_tiles(int64_t columns) {
  TileConfig config;
  for (int i = 0; i < 6; ++i) {
    const bool holds_activations = i / 2 == 1, holds_codes = i / 2 == 2;
    config.rows[i] = static_cast<uint8_t>(holds_codes ? columns / 4 : kRows);
    config.row_bytes[i] = static_cast<uint16_t>(holds_activations ? columns : 4 * kChannels);
  }
  finish_writes();
  _tile_loadconfig(&config);
}

// Some columns of sixteen channels' codes, less their zero point and a byte for each.
template <int bits>
void expand(const uint8_t* codes, int64_t columns, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(bits == 4 ? 8 : -128);
  constexpr int64_t kStep = bits == 4 ? 8 : 4;
  for (int64_t k = 0; k < columns; k += kStep, codes += 4 * kGroup, to += kStep * kChannels) {
    const __m512i stored = _mm512_load_si512(codes);
    __builtin_prefetch(codes + kAhead);
    if constexpr (bits == 4) {
      _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(stored, low), zero));
      _mm512_store_si512(to + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(stored, 4), low), zero));
    } else {
      _mm512_store_si512(to, _mm512_sub_epi8(stored, zero));
    }
  }
  finish_writes();
}

// Sixteen rows and channels over some blocks.
struct Part {
  const uint8_t* activations;
  int64_t row_bytes;
  const uint8_t* codes;
  int64_t block, blocks;
  const uint8_t* scales;  // [blocks, group]
  bool scales_are_short;
  const float* activation_scales;  // [blocks, stride]
  int64_t stride;

  DIFFQUANT_INLINE __m512 scales_of(int64_t i) const {
    if (!scales_are_short) return _mm512_load_ps(reinterpret_cast<const float*>(scales) + i * kGroup);
    const __m256i upper = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales + 2 * i * kGroup));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
  }
};

// A product that came out of its tile, and what it is multiplied by.
struct Waiting {
  const int32_t* products;
  __m512 scales;
  const float* activation_scales;

  // Adds a quarter of its rows to the sums.
  template <int quarter>
  DIFFQUANT_INLINE void add(__m512 (&sums)[kRows]) const {
#pragma GCC unroll 4
    for (int r = 4 * quarter; r < 4 * quarter + 4; ++r) {
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(activation_scales[r]), scales);
      const __m512i whole = _mm512_load_si512(products + r * kChannels);
      sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), scale, sums[r]);
    }
  }
};

// Begins a block's product, stores that of the block before, and adds an earlier one. They take turns: the processor
// does not look far enough ahead to find the next work of the unit behind all that is to be added.
template <bool odd>
DIFFQUANT_INLINE void step(const Part& p, int64_t block, Products (&products)[kHeld], __m512 (&sums)[kRows]) {
  const bool multiplies = block < p.blocks, stores = block > 0 && block <= p.blocks, adds = block >= kBehind;
  const int64_t columns = smaller<int64_t>(p.block, 64), old = block - kBehind;
  const uint8_t* x = p.activations + block * p.block;
  const uint8_t* codes = p.codes + block * p.block * kChannels;
  Waiting waiting{};
  if (adds) waiting = {products[old % kHeld], p.scales_of(old), p.activation_scales + old * p.stride};
  if (multiplies) {
    Tiles<odd>::zero();
    for (int64_t k = columns; k < p.block; k += columns, x += columns, codes += columns * kChannels) {
      Tiles<odd>::load_activations(x, p.row_bytes);
      Tiles<odd>::load_codes(codes);
      Tiles<odd>::multiply();
    }
    Tiles<odd>::load_activations(x, p.row_bytes);
  }
  if (adds) waiting.add<0>(sums);
  if (multiplies) Tiles<odd>::load_codes(codes);
  if (adds) waiting.add<1>(sums);
  if (multiplies) Tiles<odd>::multiply();
  if (adds) waiting.add<2>(sums);
  if (stores) Tiles<!odd>::store(products[(block - 1) % kHeld]);
  if (adds) waiting.add<3>(sums);
}

// Adds a part to y, or begins it. Rows from `height` on are computed and left out.
void add_part(const Part& p, bool begins, int64_t height, int64_t channels, float* y, int64_t width) {
  const auto mask = static_cast<__mmask16>((1u << channels) - 1);
  alignas(64) Products products[kHeld];
  __m512 sums[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sums[r] = begins || r >= height ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, y + r * width);
    // For the next part: products that are stored would wait behind outputs that are not at hand.
    __builtin_prefetch(y + (r + kRows) * width, 1);
  }
  for (int64_t block = 0; block < p.blocks + kBehind; ++block) {
    block % 2 ? step<true>(p, block, products, sums) : step<false>(p, block, products, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    if (r < height) _mm512_mask_storeu_ps(y + r * width, mask, sums[r]);
  }
}

template <int bits>
void multiply_by_tiles(const PackedMatrix& m, const RoundedRows& rows, int64_t first, int64_t last, float* y) {
  alignas(64) uint8_t expanded[kSpan * kChannels];
  for (int64_t channel = first * kGroup; channel < smaller(last * kGroup, m.channels); channel += kChannels) {
    const int64_t group = channel / kGroup, within = channel % kGroup;
    for (int64_t column = 0; column < m.padded(); column += kSpan) {
      const int64_t columns = smaller(kSpan, m.padded() - column), block = column / m.block;
      expand<bits>(m.codes + group * m.group_bytes() + column * kGroup * bits / 8 + 4 * within, columns, expanded);
      for (int64_t row = 0; row < rows.rows; row += kRows) {
        const Part part{rows.codes + row * m.padded() + column,
                        m.padded(),
                        expanded,
                        m.block,
                        columns / m.block,
                        m.scales + ((group * m.blocks() + block) * kGroup + within) * m.scale_bytes(),
                        m.scales_are_short,
                        rows.scales + block * rows.stride + row,
                        rows.stride};
        add_part(part, column == 0, smaller(kRows, rows.rows - row), smaller(kChannels, m.channels - channel),
                 y + row * m.channels + channel, m.channels);
      }
    }
  }
}

int64_t activation_bytes(int64_t bits) { return kVnniMatmul.activation_bytes(bits); }

void pack(const PackedMatrix& m, const uint8_t* codes, const float* scales) { kVnniMatmul.pack(m, codes, scales); }

void round(const PackedMatrix& m, const float* x, const RoundedRows& rows, int64_t first, int64_t last) {
  kVnniMatmul.round(m, x, rows, first, last);
  if (last < rows.rows) return;
  // What fills up the last tile has scales of zero, which cost no more than others.
  for (int64_t block = 0; block < m.blocks(); ++block) {
    for (int64_t row = last; row < round_up(last, kRows); ++row) rows.scales[block * rows.stride + row] = 0;
  }
}

void multiply(const PackedMatrix& m, const RoundedRows& rows, int64_t first, int64_t last, float* y) {
  if (rows.rows < kFewest) return kVnniMatmul.multiply(m, rows, first, last, y);
  configure_tiles(smaller<int64_t>(m.block, 64));
  m.bits == 4 ? multiply_by_tiles<4>(m, rows, first, last, y) : multiply_by_tiles<8>(m, rows, first, last, y);
  _tile_release();
}

}  // namespace

extern const MatmulKernel kAmxMatmul = {"amx", kGroup, kMost, activation_bytes, pack, round, multiply};

}  // namespace diffquant
