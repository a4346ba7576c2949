// The products of a tile in bfloat16 with sums in float32: two products per lane and instruction, twice as many as in
// float32. For rows that were rounded when they were stored. int8 is exact in bfloat16; its scales come afterwards.
#pragma once

#if defined(__AVX512BF16__) || (defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define RING_BF16

#include <type_traits>

#include "attention.h"
#include "half.h"
#include "int8.h"
#include "tile.h"

namespace ring {

// Two bfloat16 numbers, the first one in the low half.
using Pair = uint32_t;

typedef Pair PairVec __attribute__((vector_size(sizeof(Vec))));

#if defined(__AVX512BF16__)
using Rounded = __m256i;
inline Rounded rounded(Vec value) { return (__m256i)_mm512_cvtneps_pbh((__m512)value); }
inline PairVec widened(Rounded value) { return (PairVec)_mm512_cvtepu16_epi32(value); }
inline Vec add_products(Vec sum, PairVec one, PairVec many) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)many);
}
#else
using Rounded = uint16x4_t;
inline Rounded rounded(Vec value) { return vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)value)); }
inline PairVec widened(Rounded value) { return (PairVec)vmovl_u16(value); }
inline Vec add_products(Vec sum, PairVec one, PairVec many) {
  return (Vec)vbfdotq_f32(
      (float32x4_t)sum, vreinterpretq_bf16_u32((uint32x4_t)one), vreinterpretq_bf16_u32((uint32x4_t)many));
}
#endif

// Lane i: a[i] below, b[i] above.
inline PairVec interleaved(Vec a, Vec b) { return widened(rounded(a)) | widened(rounded(b)) << 16; }

inline PairVec load(const Pair* from) {
  PairVec out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

inline void store(Pair* to, PairVec value) { std::memcpy(to, &value, sizeof(value)); }

// sums[r][tile] += sum over p of one[r * row_step + p * pair_step] * many[p][tile].
template <int R>
inline void add_pairs(
    Vec (&sums)[R][kTileVecs], const Pair* one, int64_t row_step, int64_t pair_step, const Pair* many, int64_t pairs) {
  for (int64_t p = 0; p < pairs; ++p) {
    PairVec tile[kTileVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; ++v) tile[v] = load(many + p * kTile + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const PairVec pair = PairVec{} + one[r * row_step + p * pair_step];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] = add_products(sums[r][v], pair, tile[v]);
    }
  }
}

template <int R>
inline void store_rows(const Vec (&sums)[R][kTileVecs], float* to) {
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kTileVecs; ++v) store(to + r * kTile + v * kWidth, sums[r][v]);
  }
}

// scores[r][tile] = sum over d of rows[r][d] * packed[d][tile].
template <int R>
inline void pair_scores(const Pair* rows, int64_t pairs, const Pair* packed, float* scores) {
  Vec sums[R][kTileVecs] = {};
  add_pairs<R>(sums, rows, pairs, 1, packed, pairs);
  store_rows<R>(sums, scores);
}

// out[r][tile] = out[r][tile] * keep[tile] + sum over pairs of rows of values[p][r] * weights[p][tile].
template <int R>
inline void pair_values(
    const Pair* values, int64_t pairs, int64_t stride, const Pair* weights, const Vec* keep, float* out) {
  Vec sums[R][kTileVecs];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kTileVecs; ++v) sums[r][v] = load(out + r * kTile + v * kWidth) * keep[v];
  }
  add_pairs<R>(sums, values, 1, stride, weights, pairs);
  store_rows<R>(sums, out);
}

template <typename E>
class Bf16Tile {
 public:
  using Rows = typename Forms<E>::Rows;
  static constexpr int kTogether = 2;

  // Rows are padded with zeros to whole vectors of pairs.
  explicit Bf16Tile(int64_t head_dim)
      : head_dim_(head_dim), padded_((head_dim + 2 * kWidth - 1) / (2 * kWidth) * 2 * kWidth) {
    static thread_local std::vector<Pair> scratch;
    const int64_t pairs = padded_ / 2;
    scratch.resize(pairs * kTogether * kTile + kBlock * padded_ + kBlock / 2 * kTile);
    packed_ = scratch.data();
    keys_ = packed_ + pairs * kTogether * kTile;
    values_ = keys_ + kBlock * pairs;
    weights_ = values_ + kBlock / 2 * padded_;
  }

  // Lane n of tile `which`: the query times `factor`.
  void set_query(int which, int64_t n, Rows query, float factor) {
    Pair* to = packed_ + which * padded_ / 2 * kTile + n;
    if constexpr (kScaled) lane_factors_[which * kTile + n] = *query.scales * factor;
    const Vec factors = splat(kScaled ? 1.0f : factor);
    for (int64_t d = 0; d < padded_; d += kWidth) {
      uint16_t lanes[kWidth];
      const Rounded some = rounded(part(query, d) * factors);
      std::memcpy(lanes, &some, sizeof(lanes));
      for (int i = 0; i < kWidth; i += 2) to[(d + i) / 2 * kTile] = lanes[i] | Pair(lanes[i + 1]) << 16;
    }
  }

  // Converts the next rows, at most kBlock.
  void take(const Rows* keys, const Rows* values, int64_t count) {
    count_ = count;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < padded_; d += kWidth) {
        const Rounded some = rounded(part(keys[i], d));
        std::memcpy(keys_ + (i * padded_ + d) / 2, &some, sizeof(some));
      }
    }
    for (int64_t i = 0; i < count; i += 2) {
      for (int64_t d = 0; d < padded_; d += kWidth) {
        const Vec second = i + 1 < count ? part(values[i + 1], d) : Vec{};
        store(values_ + i / 2 * padded_ + d, interleaved(part(values[i], d), second));
      }
    }
    if constexpr (kScaled) {
      for (int64_t i = 0; i < count; ++i) {
        key_scales_[i] = *keys[i].scales;
        value_scales_[i] = *values[i].scales;
      }
    }
  }

  // scores[i][tile] of every row.
  void score(int which, float* scores) const {
    const int64_t pairs = padded_ / 2;
    const Pair* packed = packed_ + which * pairs * kTile;
    int64_t i = 0;
    for (; i + kSteps <= count_; i += kSteps) pair_scores<kSteps>(keys_ + i * pairs, pairs, packed, scores + i * kTile);
    for (; i < count_; ++i) pair_scores<1>(keys_ + i * pairs, pairs, packed, scores + i * kTile);
    if constexpr (kScaled) {
      for (i = 0; i < count_; ++i) {
        for (int n = 0; n < kTile; n += kWidth) {
          float* at = scores + i * kTile + n;
          store(at, load(at) * load(lane_factors_ + which * kTile + n) * key_scales_[i]);
        }
      }
    }
  }

  // out[d][tile] = out[d][tile] * keep[tile] + the rows' weighted values.
  void add(const float* weights, const Vec* keep, float* out) const {
    for (int64_t i = 0; i < count_; i += 2) {
      for (int v = 0; v < kTileVecs; ++v) {
        const float* from = weights + i * kTile + v * kWidth;
        Vec first = load(from), second = i + 1 < count_ ? load(from + kTile) : Vec{};
        if constexpr (kScaled) {
          first *= value_scales_[i];
          if (i + 1 < count_) second *= value_scales_[i + 1];
        }
        store(weights_ + i / 2 * kTile + v * kWidth, interleaved(first, second));
      }
    }
    const int64_t pairs = (count_ + 1) / 2;
    int64_t d = 0;
    for (; d + kSteps <= head_dim_; d += kSteps) {
      pair_values<kSteps>(values_ + d, pairs, padded_, weights_, keep, out + d * kTile);
    }
    for (; d < head_dim_; ++d) pair_values<1>(values_ + d, pairs, padded_, weights_, keep, out + d * kTile);
  }

 private:
  static constexpr bool kScaled = std::is_same<E, int8_t>::value;

  // Elements d .. d + kWidth of a row without its scale, zeros after its end.
  Vec part(Rows row, int64_t d) const {
    const E* from = numbers(row);
    if (d + kWidth <= head_dim_) return load(from + d);
    float some[kWidth] = {};
    for (int64_t i = d; i < head_dim_; ++i) some[i - d] = to_float(from[i]);
    return load(some);
  }

  int64_t head_dim_, padded_, count_ = 0;
  Pair *packed_, *keys_;  // pairs along D: queries, each tile [D/2, tile]; [kBlock, D/2]
  Pair *values_, *weights_;  // pairs of rows: [kBlock/2, D]; [kBlock/2, tile]
  float lane_factors_[kScaled ? kTogether * kTile : 1], key_scales_[kScaled ? kBlock : 1];
  float value_scales_[kScaled ? kBlock : 1];
};

}  // namespace ring

#endif
