#include <immintrin.h>

#include "matmul_kernel.h"

namespace diffquant {
namespace {

// Intel's matrix unit beside AVX-512 VNNI, whose order of codes and rounded rows it shares: many rows of activations are
// multiplied by tiles, sixteen rows by sixteen channels at once, and few of them by VNNI.
constexpr int64_t kRows = 16, kChannels = 16, kGroup = 32;
// Rows that fill enough of a tile.
constexpr int64_t kFewest = 8;
// Columns whose codes, expanded, and rows of activations lie in a first-level cache together.
constexpr int64_t kSpan = 768;

// The layout of LDTILECONFIG. Tiles 0 and 1 are products, 2 and 3 activations, 4 and 5 codes.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure_tiles(int64_t columns) {
  TileConfig config;
  for (int i = 0; i < 6; ++i) {
    config.rows[i] = static_cast<uint8_t>(i < 4 ? kRows : columns / 4);
    config.row_bytes[i] = static_cast<uint16_t>(i == 2 || i == 3 ? columns : 4 * kChannels);
  }
  _tile_loadconfig(&config);
}

// g++ does not know that loading a tile reads memory.
DIFFQUANT_INLINE void finish_writes() { asm volatile("" ::: "memory"); }

// Some columns of sixteen channels' codes, less their zero point and a byte for each.
template <int bits>
void expand(const uint8_t* codes, int64_t columns, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(bits == 4 ? 8 : -128);
  constexpr int64_t kStep = bits == 4 ? 8 : 4;
  for (int64_t k = 0; k < columns; k += kStep, codes += 4 * kGroup, to += kStep * kChannels) {
    const __m512i stored = _mm512_load_si512(codes);
    if constexpr (bits == 4) {
      _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(stored, low), zero));
      _mm512_store_si512(to + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(stored, 4), low), zero));
    } else {
      _mm512_store_si512(to, _mm512_sub_epi8(stored, zero));
    }
  }
}

// What becomes a tile of outputs: sixteen rows and channels over some blocks.
struct Part {
  const uint8_t* activations;
  int64_t row_bytes;
  const uint8_t* codes;
  int64_t block, blocks;
  const uint8_t* scales;  // [blocks, group]
  bool scales_are_short;
  const float* activation_scales;  // [blocks, stride]
  int64_t stride;
};

DIFFQUANT_INLINE __m512 scales_of(const Part& p, int64_t block) {
  const int64_t i = block * kGroup;
  if (!p.scales_are_short) return _mm512_load_ps(reinterpret_cast<const float*>(p.scales) + i);
  const __m256i upper = _mm256_load_si256(reinterpret_cast<const __m256i*>(p.scales + 2 * i));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
}

// Blocks that products wait for their scales, and how many wait at once at most.
constexpr int64_t kBehind = 6, kHeld = 8;

template <int first>
DIFFQUANT_INLINE void add_rows(const int32_t* products, __m512 scales, const float* activation_scales,
                               __m512 (&sums)[kRows]) {
#pragma GCC unroll 4
  for (int r = first; r < first + 4; ++r) {
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(activation_scales[r]), scales);
    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products + r * kChannels)), scale, sums[r]);
  }
}

// Begins a block's products in tile 0 or 1, takes the block before out of the other, and adds an earlier one: fine
// turns of both keep the unit busy while others are scaled.
template <bool odd, bool multiplies, bool stores, bool adds>
DIFFQUANT_INLINE void step(const Part& p, int64_t block, int64_t columns, int32_t (&products)[kHeld][kRows * kChannels],
                           __m512 (&sums)[kRows]) {
  const uint8_t* x = p.activations + block * p.block;
  const uint8_t* codes = p.codes + block * p.block * kChannels;
  const int32_t* old = products[(block - kBehind) % kHeld];
  int32_t* before = products[(block - 1) % kHeld];
  const float* activation_scales = p.activation_scales + (block - kBehind) * p.stride;
  const __m512 scales = adds ? scales_of(p, block - kBehind) : _mm512_setzero_ps();
  if constexpr (multiplies) {
    if constexpr (odd) _tile_zero(1); else _tile_zero(0);
    for (int64_t k = columns; k < p.block; k += columns, x += columns, codes += columns * kChannels) {
      if constexpr (odd) {
        _tile_loadd(3, x, p.row_bytes);
        _tile_loadd(5, codes, 4 * kChannels);
        _tile_dpbssd(1, 3, 5);
      } else {
        _tile_loadd(2, x, p.row_bytes);
        _tile_loadd(4, codes, 4 * kChannels);
        _tile_dpbssd(0, 2, 4);
      }
    }
    if constexpr (odd) _tile_loadd(3, x, p.row_bytes); else _tile_loadd(2, x, p.row_bytes);
  }
  if constexpr (adds) add_rows<0>(old, scales, activation_scales, sums);
  if constexpr (multiplies) { if constexpr (odd) _tile_loadd(5, codes, 4 * kChannels); else _tile_loadd(4, codes, 4 * kChannels); }
  if constexpr (adds) add_rows<4>(old, scales, activation_scales, sums);
  if constexpr (multiplies) { if constexpr (odd) _tile_dpbssd(1, 3, 5); else _tile_dpbssd(0, 2, 4); }
  if constexpr (adds) add_rows<8>(old, scales, activation_scales, sums);
  if constexpr (stores) { if constexpr (odd) _tile_stored(0, before, 64); else _tile_stored(1, before, 64); }
  if constexpr (adds) add_rows<12>(old, scales, activation_scales, sums);
}

// Adds a part to y, or begins it.
void add_part(const Part& p, bool begins, int64_t height, int64_t channels, float* y, int64_t width) {
  const auto mask = static_cast<__mmask16>((1u << channels) - 1);
  const int64_t columns = smaller<int64_t>(p.block, 64);
  // Stores that miss would hold up those of products.
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) __builtin_prefetch(y + r * width, 1);
  alignas(64) int32_t products[kHeld][kRows * kChannels];
  __m512 sums[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    sums[r] = begins || r >= height ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, y + r * width);
  }
  for (int64_t block = 0; block < p.blocks + kBehind; ++block) {
    const bool odd = block % 2, multiplies = block < p.blocks, stores = block > 0 && block <= p.blocks, adds = block >= kBehind;
    if (multiplies && stores && adds) {
      odd ? step<true, true, true, true>(p, block, columns, products, sums)
          : step<false, true, true, true>(p, block, columns, products, sums);
    } else if (multiplies && stores) {
      odd ? step<true, true, true, false>(p, block, columns, products, sums)
          : step<false, true, true, false>(p, block, columns, products, sums);
    } else if (multiplies) {
      step<false, true, false, false>(p, block, columns, products, sums);
    } else if (stores && adds) {
      odd ? step<true, false, true, true>(p, block, columns, products, sums)
          : step<false, false, true, true>(p, block, columns, products, sums);
    } else if (stores) {
      odd ? step<true, false, true, false>(p, block, columns, products, sums)
          : step<false, false, true, false>(p, block, columns, products, sums);
    } else if (adds) {
      step<false, false, false, true>(p, block, columns, products, sums);
    }
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
      expand<bits>(m.codes + group * m.group_bytes() + column * kGroup * bits / 8 + within * 4, columns, expanded);
      finish_writes();
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
  // What fills up the last tile is zero, so that it costs no more than numbers do.
  for (int64_t block = 0; block < m.blocks(); ++block) {
    for (int64_t row = rows.rows; row < round_up(rows.rows, kRows); ++row) {
      rows.scales[block * rows.stride + row] = 0;
      rows.offsets[block * rows.stride + row] = 0;
    }
  }
}

void multiply(const PackedMatrix& m, const RoundedRows& rows, int64_t first, int64_t last, float* y) {
  if (rows.rows < kFewest) return kVnniMatmul.multiply(m, rows, first, last, y);
  configure_tiles(smaller<int64_t>(m.block, 64));
  m.bits == 4 ? multiply_by_tiles<4>(m, rows, first, last, y) : multiply_by_tiles<8>(m, rows, first, last, y);
  _tile_release();
}

}  // namespace

extern const MatmulKernel kAmxMatmul = {"amx", kGroup, activation_bytes, pack, round, multiply};

}  // namespace diffquant
