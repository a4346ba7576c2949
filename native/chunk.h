// Attention of several queries.
//
// The N = Q G queries of a KV head, query by query and within it head by head, are cut into tiles of kTile. A tile's
// queries lie transposed, [D, tile], so every vector runs along the tile: one element of a key or value is multiplied
// with the whole tile, and softmax needs no sums across a vector. Rows are processed in blocks of kBlock, with the
// running maximum and sum of online softmax (Milakov and Gimelshein, 2018). Where rows must be converted, two tiles
// share the conversion.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "half.h"
#include "int8.h"
#include "tile_bf16.h"
#include "tile_float.h"

namespace ring {

struct Tile {
  int64_t first, last;     // queries of the sequence, inclusive
  int64_t query_of[kTile];  // relative to `first`; lanes past the end repeat the last
};

// The rows of begin .. end that some query of first .. last sees, and whether each of them needs the mask.
template <typename E>
int64_t visible_rows(
    const Attention<E>& a, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t* index, bool* partial) {
  int64_t count = 0;
  if (!a.mask) {
    for (int64_t t = begin; t < end; ++t) {
      index[count] = t;
      partial[count++] = a.causal && t > a.start + first;
    }
    return count;
  }
  float least[kBlock], most[kBlock];
  const int64_t length = end - begin;
  std::fill(least, least + length, 0.0f);
  std::fill(most, most + length, kNever);
  for (int64_t q = first; q <= last; ++q) {
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

// Turns scores [count, tile] into weights relative to the new maximum; `keep` is the factor for older weights.
inline void tile_softmax(float* scores, int64_t count, Vec* largest, Vec* sums, Vec* keep) {
  for (int v = 0; v < kTileVecs; ++v) {
    Vec most = largest[v];
    for (int64_t i = 0; i < count; ++i) most = larger(load(scores + i * kTile + v * kWidth), most);
    // A lane that has seen no row yet: minus infinity minus itself is NaN.
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

// How a tile's products are computed: bfloat16 for float16 and int8 rows, which were rounded when they were stored.
template <typename E>
struct TileOf {
  using Type = FloatTile<E>;
};
#if defined(RING_BF16)
template <>
struct TileOf<Half> {
  using Type = Bf16Tile<Half>;
};
template <>
struct TileOf<int8_t> {
  using Type = Bf16Tile<int8_t>;
};
#endif

// One tile while it is computed.
struct Progress {
  Tile tile;
  int64_t used;           // lanes that hold a query of their own; the others repeat the last
  int64_t places[kTile];  // where each lane's query, and its result, begins
  Vec largest[kTileVecs], sums[kTileVecs];
  float* out;  // [D, tile], the weighted values so far
};

template <typename E, typename Products>
void begin_tile(
    const Attention<E>& a, int64_t kv_head, int64_t begin_query, Progress& to, int which, Products& products) {
  const int64_t group = a.group();
  to.used = std::min<int64_t>(kTile, a.query_len * group - begin_query);
  to.tile.first = begin_query / group;
  to.tile.last = (begin_query + to.used - 1) / group;
  constexpr int64_t line = 64 / sizeof(E);
  for (int64_t n = 0; n < kTile; ++n) {
    const int64_t global = begin_query + std::min(n, to.used - 1);
    to.tile.query_of[n] = global / group - to.tile.first;
    to.places[n] = (global / group * a.num_heads + kv_head * group + global % group) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += line) __builtin_prefetch(numbers(a.query) + to.places[n] + d);
  }
  for (int64_t n = 0; n < kTile; ++n) products.set_query(which, n, a.query + to.places[n], a.scale * kLog2E);
  std::fill(to.out, to.out + a.head_dim * kTile, 0.0f);
  for (int v = 0; v < kTileVecs; ++v) {
    to.largest[v] = splat(kNever);
    to.sums[v] = Vec{};
  }
}

template <typename E>
void end_tile(const Attention<E>& a, const Progress& from) {
  float inverse[kTile];
  for (int v = 0; v < kTileVecs; ++v) {
    store(inverse + v * kWidth, from.sums[v] > Vec{} ? splat(1.0f) / from.sums[v] : Vec{});
  }
  static thread_local std::vector<float> one;
  one.resize(a.head_dim);
  for (int64_t n = 0; n < from.used; ++n) {
    for (int64_t d = 0; d < a.head_dim; ++d) one[d] = from.out[d * kTile + n] * inverse[n];
    convert(one.data(), a.out + from.places[n], a.head_dim);
  }
}

template <typename E>
constexpr int kTilesTogether = TileOf<E>::Type::kTogether;

// The tiles from `begin_query` on that share the conversion of rows.
template <typename E>
void attend_tiles(const Attention<E>& a, int64_t kv_head, int64_t begin_query) {
  typename TileOf<E>::Type products(a.head_dim);
  static thread_local std::vector<float> scratch;
  scratch.resize((kTilesTogether<E> * a.head_dim + kBlock) * kTile);
  float* scores = scratch.data();
  Progress tiles[kTilesTogether<E>];
  int together = 0;
  do {
    tiles[together].out = scores + (kBlock + together * a.head_dim) * kTile;
    begin_tile(a, kv_head, begin_query, tiles[together], together, products);
    begin_query += kTile;
    ++together;
  } while (together < kTilesTogether<E> && begin_query < a.query_len * a.group());
  const int64_t first = tiles[0].tile.first, last = tiles[together - 1].tile.last;
  const int64_t limit = a.mask ? a.rows : a.start + (a.causal ? last + 1 : a.query_len);
  for (int64_t begin = 0; begin < limit; begin += kBlock) {
    int64_t index[kBlock];
    bool partial[kBlock];
    const int64_t count = visible_rows(a, first, last, begin, std::min(limit, begin + kBlock), index, partial);
    if (!count) continue;
    typename Forms<E>::Rows keys[kBlock], values[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = index[i] * a.row_size() + kv_head * a.head_dim;
      keys[i] = a.keys + at;
      values[i] = a.values + at;
    }
    products.take(keys, values, count);
    for (int which = 0; which < together; ++which) {
      Progress& tile = tiles[which];
      Vec keep[kTileVecs];
      products.score(which, scores);
      for (int64_t i = 0; i < count; ++i) {
        if (partial[i]) apply_mask(a, tile.tile, index[i], scores + i * kTile);
      }
      tile_softmax(scores, count, tile.largest, tile.sums, keep);
      products.add(scores, keep, tile.out);
    }
  }
  for (int which = 0; which < together; ++which) end_tile(a, tiles[which]);
}

}  // namespace ring
