#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace ring {
namespace {

constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// One query.
//
// All G query heads of a KV head go over its rows together, so that a row comes from memory once, and the rows are
// split into parts of kPart, so that the threads share them whatever the number of heads. Every part leaves its largest
// score, its sum and its weighted values; they are brought to one maximum at the end.

constexpr int64_t kPart = 128;
constexpr int kHeadsTogether = 4;
constexpr int kRowsAhead = 8;
constexpr int kRowsTogether = kRegisters == 32 ? 4 : 2;

// scores[g * kPart + i] of rows i .. i + R - 1 for G heads.
template <int G, int R>
inline void single_scores(
    const Attention& a, const float* query, const float* const* rows, const float* const* values, float* scores) {
  // The rows have gone out of the caches since the last token, and the hardware follows them to the end of a page only.
  const int64_t row_size = a.num_kv_heads * a.head_dim;
  Vec sums[G][R] = {};
  int64_t d = 0;
  for (; d + kWidth <= a.head_dim; d += kWidth) {
    Vec key[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      key[r] = load(rows[r] + d);
      __builtin_prefetch(rows[r] + kRowsAhead * row_size + d);
      __builtin_prefetch(values[r] + d);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vec q = load(query + g * a.head_dim + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[g][r] += q * key[r];
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int r = 0; r < R; ++r) {
      float total = sum(sums[g][r]);
      for (int64_t rest = d; rest < a.head_dim; ++rest) total += query[g * a.head_dim + rest] * rows[r][rest];
      scores[g * kPart + r] = total * a.scale * kLog2E;
    }
  }
}

// out[g][d .. d + N * kWidth) of all rows' weighted values.
template <int G, int N>
inline void single_values(
    const Attention& a, const float* const* rows, int64_t count, int64_t d, const float* weights, float* out) {
  Vec sums[G][N] = {};
  for (int64_t i = 0; i < count; ++i) {
    Vec value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = load(rows[i] + d + n * kWidth);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[g][n] += splat(weights[g * kPart + i]) * value[n];
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int n = 0; n < N; ++n) store(out + g * a.head_dim + d + n * kWidth, sums[g][n]);
  }
}

// What a part leaves for G heads: largest score [G], sum of weights [G], weighted values [G, D].
template <int G>
void single_part(
    const Attention& a, int64_t kv_head, int64_t head, int64_t begin, int64_t end, float* largest, float* sums,
    float* out) {
  const int64_t row_size = a.num_kv_heads * a.head_dim;
  const float* query = a.query + head * a.head_dim;
  const float *keys[kPart], *values[kPart];
  int64_t index[kPart], count = 0;
  for (int64_t t = begin; t < end; ++t) {
    if (a.mask && !(a.mask[t] > kHidden)) continue;
    keys[count] = a.keys + t * row_size + kv_head * a.head_dim;
    values[count] = a.values + t * row_size + kv_head * a.head_dim;
    index[count++] = t;
  }
  float scores[G * kPart];
  int64_t i = 0;
  for (; i + kRowsTogether <= count; i += kRowsTogether) {
    single_scores<G, kRowsTogether>(a, query, keys + i, values + i, scores + i);
  }
  for (; i < count; ++i) single_scores<G, 1>(a, query, keys + i, values + i, scores + i);
  for (int g = 0; g < G; ++g) {
    float* own = scores + g * kPart;
    if (a.mask) {
      for (i = 0; i < count; ++i) own[i] += a.mask[index[i]] * kLog2E;
    }
    float most = kNever;
    for (i = 0; i < count; ++i) most = std::max(most, own[i]);
    for (i = count; i % kWidth; ++i) own[i] = kNever;
    Vec total = {};
    for (int64_t v = 0; v < i; v += kWidth) {
      const Vec weight = exp2_nonpositive(load(own + v) - splat(most));
      total += weight;
      store(own + v, weight);
    }
    largest[g] = most;
    sums[g] = count ? sum(total) : 0.0f;
  }
  int64_t d = 0;
  constexpr int kWide = 4;
  for (; d + kWide * kWidth <= a.head_dim; d += kWide * kWidth) single_values<G, kWide>(a, values, count, d, scores, out);
  for (; d + kWidth <= a.head_dim; d += kWidth) single_values<G, 1>(a, values, count, d, scores, out);
  for (; d < a.head_dim; ++d) {
    for (int g = 0; g < G; ++g) {
      float total = 0.0f;
      for (i = 0; i < count; ++i) total += scores[g * kPart + i] * values[i][d];
      out[g * a.head_dim + d] = total;
    }
  }
}

void single_query(const Attention& a, const Parallel& parallel) {
  const int64_t rows = a.mask ? a.rows : a.start + 1;
  const int64_t parts = (rows + kPart - 1) / kPart;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t batches = (group + kHeadsTogether - 1) / kHeadsTogether;
  // Of every part: largest [H], sum [H], values [H, D].
  const int64_t stride = a.num_heads * (a.head_dim + 2);
  std::vector<float> partial(parts * stride);
  parallel(parts * a.num_kv_heads, [&](int64_t task) {
    const int64_t part = task / a.num_kv_heads, kv_head = task % a.num_kv_heads;
    const int64_t begin = part * kPart, end = std::min(rows, begin + kPart);
    for (int64_t batch = 0; batch < batches; ++batch) {
      const int64_t head = kv_head * group + batch * kHeadsTogether;
      const int64_t heads = std::min<int64_t>(kHeadsTogether, group - batch * kHeadsTogether);
      float* largest = partial.data() + part * stride + head;
      float* sums = largest + a.num_heads;
      float* out = partial.data() + part * stride + 2 * a.num_heads + head * a.head_dim;
      switch (heads) {
        case 1: single_part<1>(a, kv_head, head, begin, end, largest, sums, out); break;
        case 2: single_part<2>(a, kv_head, head, begin, end, largest, sums, out); break;
        case 3: single_part<3>(a, kv_head, head, begin, end, largest, sums, out); break;
        default: single_part<4>(a, kv_head, head, begin, end, largest, sums, out);
      }
    }
  });
  for (int64_t head = 0; head < a.num_heads; ++head) {
    float most = kNever, total = 0.0f;
    for (int64_t part = 0; part < parts; ++part) most = std::max(most, partial[part * stride + head]);
    float* out = a.out + head * a.head_dim;
    std::fill(out, out + a.head_dim, 0.0f);
    if (most == kNever) continue;
    for (int64_t part = 0; part < parts; ++part) {
      const float* left = partial.data() + part * stride;
      if (left[head] == kNever) continue;
      const float weight = std::exp2(left[head] - most);
      total += weight * left[a.num_heads + head];
      const float* values = left + 2 * a.num_heads + head * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; ++d) out[d] += weight * values[d];
    }
    for (int64_t d = 0; d < a.head_dim; ++d) out[d] /= total;
  }
}

// Several queries.
//
// The N = Q G queries of a KV head, query by query and within it head by head, are cut into tiles of kTile. A tile's
// queries lie transposed, [D, tile], so that every vector runs along the tile: keys and values are read in place, one
// number of them against the whole tile, and softmax needs no sums across a vector. Rows go by in blocks of kBlock,
// with the running maximum and sum of online softmax (Milakov and Gimelshein, 2018).

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
int64_t visible_rows(const Attention& a, const Tile& tile, int64_t begin, int64_t end, int64_t* index, bool* partial) {
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

void apply_mask(const Attention& a, const Tile& tile, int64_t t, float* scores) {
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
void tile_softmax(float* scores, int64_t count, Vec* largest, Vec* sums, Vec* keep) {
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

void attend_tile(const Attention& a, int64_t kv_head, int64_t begin_query) {
  const int64_t group = a.num_heads / a.num_kv_heads, queries = a.query_len * group;
  const int64_t used = std::min<int64_t>(kTile, queries - begin_query);
  Tile tile;
  tile.first = begin_query / group;
  tile.last = (begin_query + used - 1) / group;
  const float* heads[kTile];
  int64_t places[kTile];
  for (int64_t n = 0; n < kTile; ++n) {
    const int64_t global = begin_query + std::min(n, used - 1);
    tile.query_of[n] = global / group - tile.first;
    places[n] = (global / group * a.num_heads + kv_head * group + global % group) * a.head_dim;
    heads[n] = a.query + places[n];
  }

  static thread_local std::vector<float> scratch;
  scratch.resize((2 * a.head_dim + kBlock) * kTile);
  float* packed = scratch.data();
  float* out = packed + a.head_dim * kTile;
  float* scores = out + a.head_dim * kTile;
  for (int64_t d = 0; d < a.head_dim; ++d) {
    for (int n = 0; n < kTile; ++n) packed[d * kTile + n] = heads[n][d] * (a.scale * kLog2E);
  }
  std::fill(out, out + a.head_dim * kTile, 0.0f);

  Vec largest[kTileVecs], sums[kTileVecs], keep[kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) {
    largest[v] = splat(kNever);
    sums[v] = Vec{};
  }
  const int64_t limit = a.mask ? a.rows : a.start + (a.causal ? tile.last + 1 : a.query_len);
  const int64_t row_size = a.num_kv_heads * a.head_dim;
  for (int64_t begin = 0; begin < limit; begin += kBlock) {
    int64_t index[kBlock];
    bool partial[kBlock];
    const float *keys[kBlock], *values[kBlock];
    const int64_t count = visible_rows(a, tile, begin, std::min(limit, begin + kBlock), index, partial);
    if (!count) continue;
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = a.keys + index[i] * row_size + kv_head * a.head_dim;
      values[i] = a.values + index[i] * row_size + kv_head * a.head_dim;
    }
    int64_t i = 0;
    for (; i + kSteps <= count; i += kSteps) tile_scores<kSteps>(keys + i, packed, a.head_dim, scores + i * kTile);
    for (; i < count; ++i) tile_scores<1>(keys + i, packed, a.head_dim, scores + i * kTile);
    for (i = 0; i < count; ++i) {
      if (partial[i]) apply_mask(a, tile, index[i], scores + i * kTile);
    }
    tile_softmax(scores, count, largest, sums, keep);
    int64_t d = 0;
    for (; d + kSteps <= a.head_dim; d += kSteps) tile_values<kSteps>(values, count, d, scores, keep, out);
    for (; d < a.head_dim; ++d) tile_values<1>(values, count, d, scores, keep, out);
  }

  float inverse[kTile];
  for (int v = 0; v < kTileVecs; ++v) {
    store(inverse + v * kWidth, sums[v] > Vec{} ? splat(1.0f) / sums[v] : Vec{});
  }
  for (int64_t n = 0; n < used; ++n) {
    float* to = a.out + places[n];
    for (int64_t d = 0; d < a.head_dim; ++d) to[d] = out[d * kTile + n] * inverse[n];
  }
}

}  // namespace

void attend(const Attention& a, const Parallel& parallel) {
  if (a.query_len == 1) return single_query(a, parallel);
  const int64_t queries = a.query_len * (a.num_heads / a.num_kv_heads);
  const int64_t tiles = (queries + kTile - 1) / kTile;
  // The last tiles see the most rows: they go first, so that no thread is left with one of them at the end.
  parallel(tiles * a.num_kv_heads, [&](int64_t task) {
    attend_tile(a, task % a.num_kv_heads, (tiles - 1 - task / a.num_kv_heads) * kTile);
  });
}

}  // namespace ring
