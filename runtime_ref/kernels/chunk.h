// Attention of several queries.
//
// The N = Q G queries of a KV head, query by query and within it head by head, are cut into tiles of kTile. A tile's
// queries lie transposed, [D, tile], so that every vector runs along the tile: keys and values are read in place, one
// number of them against the whole tile, and softmax needs no sums across a vector. Rows go by in blocks of kBlock,
// with the running maximum and sum of online softmax (Milakov and Gimelshein, 2018).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "half.h"
#include "int8.h"

namespace ring {

constexpr int kTileVecs = 3;
constexpr int kTile = kTileVecs * kWidth;
constexpr int64_t kBlock = 128;
constexpr int64_t kStretch = 64;
constexpr int kSteps = kRegisters == 32 ? 8 : 4;  // rows, or numbers of a row, against a tile at a time

struct Tile {
  int64_t first, last;     // queries of the sequence, inclusive
  int64_t query_of[kTile];  // relative to `first`; lanes past the end repeat the last
};

// scores[r][tile] = sum over d of rows[r][d] * packed[d][tile], summed by stretches of kStretch: the longer a sum in
// float32, the more of its last terms it loses.
template <int R>
inline void tile_scores(const float* const* rows, const float* packed, int64_t head_dim, float* scores) {
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

// The rows of begin .. end that some query of the tile sees, and whether each of them needs the mask.
template <typename E>
int64_t visible_rows(
    const Attention<E>& a, const Tile& tile, int64_t begin, int64_t end, int64_t* index, bool* partial) {
  int64_t count = 0;
  if (!a.mask) {
    for (int64_t t = begin; t < end; ++t) {
      index[count] = t;
      partial[count++] = a.causal && t > a.start + tile.first;
    }
    return count;
  }
  float least[kBlock], most[kBlock];
  const int64_t length = end - begin;
  std::fill(least, least + length, 0.0f);
  std::fill(most, most + length, kNever);
  for (int64_t q = tile.first; q <= tile.last; ++q) {
    const float* mask = a.mask + q * a.rows + begin;
    for (int64_t i = 0; i < length; ++i) {
      least[i] = mask[i] < least[i] ? mask[i] : least[i];
      most[i] = mask[i] > most[i] ? mask[i] : most[i];
    }
  }
  for (int64_t i = 0; i < length; ++i) {
    if (!(most[i] > kHidden)) continue;
    index[count] = begin + i;
    partial[count++] = least[i] != 0.0f || most[i] != 0.0f;
  }
  return count;
}

template <typename E>
void apply_mask(const Attention<E>& a, const Tile& tile, int64_t t, float* scores) {
  for (int n = 0; n < kTile; ++n) {
    const int64_t q = tile.first + tile.query_of[n];
    if (a.mask) {
      const float added = a.mask[q * a.rows + t];
      scores[n] = added > kHidden ? scores[n] + added * kLog2E : kNever;
    } else if (t > a.start + q) {
      scores[n] = kNever;
    }
  }
}

// Turns scores [count, tile] into weights relative to the new maximum; `keep` is what becomes of older weights.
inline void tile_softmax(float* scores, int64_t count, Vec* largest, Vec* sums, Vec* keep) {
  for (int v = 0; v < kTileVecs; ++v) {
    Vec most = largest[v];
    for (int64_t i = 0; i < count; ++i) most = larger(load(scores + i * kTile + v * kWidth), most);
    // A lane that has seen no row yet: minus infinity less itself is no number.
    const Vec base = most == splat(kNever) ? Vec{} : most;
    keep[v] = exp2_nonpositive(largest[v] - base);
    Vec total = sums[v] * keep[v];
    for (int64_t i = 0; i < count; ++i) {
      float* at = scores + i * kTile + v * kWidth;
      const Vec weight = exp2_nonpositive(load(at) - base);
      total += weight;
      store(at, weight);
    }
    largest[v] = most;
    sums[v] = total;
  }
}

// A row [D] in float32: itself, or a copy in `room`.
inline const float* as_floats(const float* row, int64_t, float*) { return row; }
inline const float* as_floats(const Half* row, int64_t head_dim, float* room) {
  convert(row, room, head_dim);
  return room;
}

template <typename E>
void attend_tile(const Attention<E>& a, int64_t kv_head, int64_t begin_query) {
  const int64_t group = a.group(), queries = a.query_len * group;
  const int64_t used = std::min<int64_t>(kTile, queries - begin_query);
  static thread_local std::vector<float> scratch;
  scratch.resize((2 * a.head_dim + kBlock) * kTile + (kBlock + 1) * a.head_dim);
  float* packed = scratch.data();
  float* out = packed + a.head_dim * kTile;
  float* scores = out + a.head_dim * kTile;
  float* room = scores + kBlock * kTile;
  float* one = room + kBlock * a.head_dim;

  Tile tile;
  tile.first = begin_query / group;
  tile.last = (begin_query + used - 1) / group;
  int64_t places[kTile];
  for (int64_t n = 0; n < kTile; ++n) {
    const int64_t global = begin_query + std::min(n, used - 1);
    tile.query_of[n] = global / group - tile.first;
    places[n] = (global / group * a.num_heads + kv_head * group + global % group) * a.head_dim;
    const float* query = as_floats(a.query + places[n], a.head_dim, one);
    for (int64_t d = 0; d < a.head_dim; ++d) packed[d * kTile + n] = query[d] * (a.scale * kLog2E);
  }
  std::fill(out, out + a.head_dim * kTile, 0.0f);

  Vec largest[kTileVecs], sums[kTileVecs], keep[kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) {
    largest[v] = splat(kNever);
    sums[v] = Vec{};
  }
  const int64_t limit = a.mask ? a.rows : a.start + (a.causal ? tile.last + 1 : a.query_len);
  for (int64_t begin = 0; begin < limit; begin += kBlock) {
    int64_t index[kBlock];
    bool partial[kBlock];
    const float* rows[kBlock];
    const int64_t count = visible_rows(a, tile, begin, std::min(limit, begin + kBlock), index, partial);
    if (!count) continue;
    const auto fetch = [&](const auto& all) {
      for (int64_t i = 0; i < count; ++i) {
        const auto row = all + index[i] * a.row_size() + kv_head * a.head_dim;
        rows[i] = as_floats(row, a.head_dim, room + i * a.head_dim);
      }
    };
    fetch(a.keys);
    int64_t i = 0;
    for (; i + kSteps <= count; i += kSteps) tile_scores<kSteps>(rows + i, packed, a.head_dim, scores + i * kTile);
    for (; i < count; ++i) tile_scores<1>(rows + i, packed, a.head_dim, scores + i * kTile);
    for (i = 0; i < count; ++i) {
      if (partial[i]) apply_mask(a, tile, index[i], scores + i * kTile);
    }
    tile_softmax(scores, count, largest, sums, keep);
    fetch(a.values);
    int64_t d = 0;
    for (; d + kSteps <= a.head_dim; d += kSteps) tile_values<kSteps>(rows, count, d, scores, keep, out);
    for (; d < a.head_dim; ++d) tile_values<1>(rows, count, d, scores, keep, out);
  }

  float inverse[kTile];
  for (int v = 0; v < kTileVecs; ++v) {
    store(inverse + v * kWidth, sums[v] > Vec{} ? splat(1.0f) / sums[v] : Vec{});
  }
  for (int64_t n = 0; n < used; ++n) {
    for (int64_t d = 0; d < a.head_dim; ++d) one[d] = out[d * kTile + n] * inverse[n];
    convert(one, a.out + places[n], a.head_dim);
  }
}

}  // namespace ring
