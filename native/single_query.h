// Attention of one query.
//
// All G query heads of a KV head go over its rows together, so a row is read from memory once. The rows are split into
// parts of kPart, so that threads share them whatever the number of heads. Every part keeps its largest score, its sum
// and its weighted values; at the end they are rescaled to one maximum and added.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "half.h"
#include "int8.h"

namespace ring {

constexpr int kHeadsTogether = 4;

// dots[g * kPart + i] of rows i .. i + R - 1 with G heads of the query.
template <int G, int R, typename E>
inline void single_dots(
    const Attention<E>& a, const float* query, const E* const* rows, const E* const* values, float* dots) {
  // The rows have left the processor's caches since the last token, and hardware prefetch stops at the end of a page.
  const int64_t row_size = a.row_size();
  constexpr int64_t line = 64 / sizeof(E);
  Vec sums[G * R] = {};
  int64_t d = 0;
  for (; d + kWidth <= a.head_dim; d += kWidth) {
    Vec key[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) key[r] = load(rows[r] + d);
    if (d % line == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(rows[r] + kRowsAhead * row_size + d);
        __builtin_prefetch(values[r] + d);
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vec q = load(query + g * a.head_dim + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[g * R + r] += q * key[r];
    }
  }
  store_sums<G, R>(sums, kPart, dots);
  for (; d < a.head_dim; ++d) {
    for (int g = 0; g < G; ++g) {
      for (int r = 0; r < R; ++r) dots[g * kPart + r] += query[g * a.head_dim + d] * to_float(rows[r][d]);
    }
  }
}

// Of `count` rows with the G heads from `head` on.
template <int G, typename E>
void part_dots(
    const Attention<E>& a, [[maybe_unused]] int64_t head, const float* query, const E* const* keys,
    const E* const* values, int64_t count, float* dots) {
  if constexpr (kIntegerDots && std::is_same<E, int8_t>::value) {
    const int8_t* integers = a.query.integers + head * a.head_dim;
    return integer_dots<G>(a.head_dim, a.row_size(), integers, keys, values, count, dots);
  }
  int64_t i = 0;
  for (; i + kRowsTogether <= count; i += kRowsTogether) {
    single_dots<G, kRowsTogether>(a, query, keys + i, values + i, dots + i);
  }
  for (; i < count; ++i) single_dots<G, 1>(a, query, keys + i, values + i, dots + i);
}

// out[g][d .. d + N * kWidth) of all rows' weighted values.
template <int G, int N, typename E>
inline void single_values(
    const Attention<E>& a, const E* const* rows, int64_t count, int64_t d, const float* weights, float* out) {
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

// The result of a part for the G heads from `head` on: largest score [G], sum of weights [G], weighted values [G, D].
template <int G, typename E>
void single_part(
    const Attention<E>& a, int64_t head, const float* query, int64_t begin, int64_t end, float* largest, float* sums,
    float* out) {
  constexpr bool scaled = std::is_same<E, int8_t>::value;
  const int64_t row_size = a.row_size(), kv_head = head / a.group();
  const E *keys[kPart], *values[kPart];
  float key_scales[kPart], value_scales[kPart];
  int64_t index[kPart], count = 0;
  for (int64_t t = begin; t < end; ++t) {
    if (a.mask && !(a.mask[t] > kHidden)) continue;
    keys[count] = numbers(a.keys) + t * row_size + kv_head * a.head_dim;
    values[count] = numbers(a.values) + t * row_size + kv_head * a.head_dim;
    if constexpr (scaled) {
      key_scales[count] = a.keys.scales[t * a.num_kv_heads + kv_head];
      value_scales[count] = a.values.scales[t * a.num_kv_heads + kv_head];
    }
    index[count++] = t;
  }
  if (!count) {  // this maximum says that the part's other results are not to be read
    std::fill(largest, largest + G, kNever);
    return;
  }
  float scores[G * kPart];
  part_dots<G>(a, head, query, keys, values, count, scores);
  int64_t i = 0;
  for (int g = 0; g < G; ++g) {
    float* own = scores + g * kPart;
    float scale = a.scale * kLog2E;
    if constexpr (scaled) {
      scale *= a.query.scales[head + g];
      for (i = 0; i < count; ++i) own[i] *= key_scales[i];
    }
    for (i = 0; i < count; ++i) own[i] *= scale;
    if (a.mask) {
      for (i = 0; i < count; ++i) own[i] += a.mask[index[i]] * kLog2E;
    }
    for (i = count; i % kWidth; ++i) own[i] = kNever;
    Vec all = splat(kNever), total = {};
    for (int64_t v = 0; v < i; v += kWidth) all = larger(load(own + v), all);
    const float most = largest_of(all);
    for (int64_t v = 0; v < i; v += kWidth) {
      const Vec weight = exp2_nonpositive(load(own + v) - splat(most));
      total += weight;
      store(own + v, weight);
    }
    largest[g] = most;
    sums[g] = sum(total);
    if constexpr (scaled) {
      for (i = 0; i < count; ++i) own[i] *= value_scales[i];
    }
  }
  int64_t d = 0;
  constexpr int kWide = 4;
  for (; d + kWide * kWidth <= a.head_dim; d += kWide * kWidth) {
    single_values<G, kWide>(a, values, count, d, scores, out);
  }
  for (; d + kWidth <= a.head_dim; d += kWidth) single_values<G, 1>(a, values, count, d, scores, out);
  for (; d < a.head_dim; ++d) {
    for (int g = 0; g < G; ++g) {
      float total = 0.0f;
      for (i = 0; i < count; ++i) total += scores[g * kPart + i] * to_float(values[i][d]);
      out[g * a.head_dim + d] = total;
    }
  }
}

template <typename E>
void single_query(const Attention<E>& a, const Parallel& parallel) {
  const int64_t rows = a.mask ? a.rows : a.start + 1;
  const int64_t parts = (rows + kPart - 1) / kPart;
  const int64_t group = a.group();
  const int64_t batches = (group + kHeadsTogether - 1) / kHeadsTogether;
  // Of every part: largest [H], sum [H], values [H, D].
  const int64_t stride = a.num_heads * (a.head_dim + 2);
  std::vector<float> partial(parts * stride), query(a.num_heads * a.head_dim), attended(a.head_dim);
  convert(numbers(a.query), query.data(), a.num_heads * a.head_dim);
  parallel(parts * a.num_kv_heads, [&](int64_t task) {
    const int64_t part = task / a.num_kv_heads, kv_head = task % a.num_kv_heads;
    const int64_t begin = part * kPart, end = std::min(rows, begin + kPart);
    for (int64_t batch = 0; batch < batches; ++batch) {
      const int64_t head = kv_head * group + batch * kHeadsTogether;
      const int64_t heads = std::min<int64_t>(kHeadsTogether, group - batch * kHeadsTogether);
      const float* own = query.data() + head * a.head_dim;
      float* largest = partial.data() + part * stride + head;
      float* sums = largest + a.num_heads;
      float* out = partial.data() + part * stride + 2 * a.num_heads + head * a.head_dim;
      switch (heads) {
        case 1: single_part<1>(a, head, own, begin, end, largest, sums, out); break;
        case 2: single_part<2>(a, head, own, begin, end, largest, sums, out); break;
        case 3: single_part<3>(a, head, own, begin, end, largest, sums, out); break;
        default: single_part<4>(a, head, own, begin, end, largest, sums, out);
      }
    }
  });
  for (int64_t head = 0; head < a.num_heads; ++head) {
    float most = kNever, total = 0.0f;
    for (int64_t part = 0; part < parts; ++part) most = std::max(most, partial[part * stride + head]);
    std::fill(attended.begin(), attended.end(), 0.0f);
    for (int64_t part = 0; most != kNever && part < parts; ++part) {
      const float* left = partial.data() + part * stride;
      if (left[head] == kNever) continue;
      const float weight = std::exp2(left[head] - most);
      total += weight * left[a.num_heads + head];
      const float* values = left + 2 * a.num_heads + head * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; ++d) attended[d] += weight * values[d];
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    for (int64_t d = 0; d < a.head_dim; ++d) attended[d] *= inverse;
    convert(attended.data(), a.out + head * a.head_dim, a.head_dim);
  }
}

}  // namespace ring
