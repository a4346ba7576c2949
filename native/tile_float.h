// The products of a tile in float32, on any processor.
#pragma once

#include <type_traits>

#include "attention.h"
#include "half.h"
#include "int8.h"
#include "tile.h"

namespace ring {

// scores[r][tile] = sum over d of rows[r][d] * packed[d][tile], in partial sums of kStretch: a long float32 sum loses
// the low bits of its last terms.
template <int R>
inline void tile_scores(const float* const* rows, const float* packed, int64_t head_dim, float* scores) {
  constexpr int64_t kStretch = 64;
  for (int64_t begin = 0; begin < head_dim; begin += kStretch) {
    const int64_t end = std::min(head_dim, begin + kStretch);
    Vec sums[R][kTileVecs] = {};
    for (int64_t d = begin; d < end; ++d) {
      Vec q[kTileVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; ++v) q[v] = load(packed + d * kTile + v * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec key = splat(rows[r][d]);
#pragma GCC unroll 4
        for (int v = 0; v < kTileVecs; ++v) sums[r][v] += key * q[v];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kTileVecs; ++v) {
        float* to = scores + r * kTile + v * kWidth;
        store(to, begin ? load(to) + sums[r][v] : sums[r][v]);
      }
    }
  }
}

// out[d + r][tile] = out[d + r][tile] * keep[tile] + sum over i of rows[i][d + r] * weights[i][tile].
template <int R>
inline void tile_values(
    const float* const* rows, int64_t count, int64_t d, const float* weights, const Vec* keep, float* out) {
  Vec sums[R][kTileVecs];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kTileVecs; ++v) sums[r][v] = load(out + (d + r) * kTile + v * kWidth) * keep[v];
  }
  for (int64_t i = 0; i < count; ++i) {
    Vec w[kTileVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; ++v) w[v] = load(weights + i * kTile + v * kWidth);
    __builtin_prefetch(rows[i] + d + 2 * kSteps);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(rows[i][d + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] += value * w[v];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kTileVecs; ++v) store(out + (d + r) * kTile + v * kWidth, sums[r][v]);
  }
}

// A row [D] as float32: the row itself, or a copy in `room`.
inline const float* as_floats(const float* row, int64_t, float*) { return row; }
inline const float* as_floats(const Half* row, int64_t head_dim, float* room) {
  convert(row, room, head_dim);
  return room;
}

template <typename E>
class FloatTile {
 public:
  using Rows = typename Forms<E>::Rows;
  static constexpr int kTogether = std::is_same<E, float>::value ? 1 : 2;

  explicit FloatTile(int64_t head_dim) : head_dim_(head_dim) {
    static thread_local std::vector<float> scratch;
    scratch.resize(head_dim * (kTogether * kTile + 2 * kBlock));
    packed_ = scratch.data();
    room_ = packed_ + kTogether * head_dim * kTile;
  }

  // Lane n of tile `which`: the query times `factor`.
  void set_query(int which, int64_t n, Rows query, float factor) {
    const float* from = as_floats(query, head_dim_, room_);
    float* to = packed_ + which * head_dim_ * kTile + n;
    for (int64_t d = 0; d < head_dim_; ++d) to[d * kTile] = from[d] * factor;
  }

  // Takes the next rows, at most kBlock.
  void take(const Rows* keys, const Rows* values, int64_t count) {
    count_ = count;
    for (int64_t i = 0; i < count; ++i) {
      keys_[i] = as_floats(keys[i], head_dim_, room_ + i * head_dim_);
      values_[i] = as_floats(values[i], head_dim_, room_ + (kBlock + i) * head_dim_);
    }
  }

  // scores[i][tile] of every row.
  void score(int which, float* scores) const {
    const float* packed = packed_ + which * head_dim_ * kTile;
    int64_t i = 0;
    for (; i + kSteps <= count_; i += kSteps) tile_scores<kSteps>(keys_ + i, packed, head_dim_, scores + i * kTile);
    for (; i < count_; ++i) tile_scores<1>(keys_ + i, packed, head_dim_, scores + i * kTile);
  }

  // out[d][tile] = out[d][tile] * keep[tile] + the rows' weighted values.
  void add(const float* weights, const Vec* keep, float* out) const {
    int64_t d = 0;
    for (; d + kSteps <= head_dim_; d += kSteps) tile_values<kSteps>(values_, count_, d, weights, keep, out);
    for (; d < head_dim_; ++d) tile_values<1>(values_, count_, d, weights, keep, out);
  }

 private:
  int64_t head_dim_, count_ = 0;
  float *packed_, *room_;  // queries, each tile [D, tile]; rows that had to be converted, [2 * kBlock, D]
  const float *keys_[kBlock], *values_[kBlock];
};

}  // namespace ring
