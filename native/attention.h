// Softmax attention of one sequence over rows of keys and values, computed in float32. Several queries over float16
// rows are multiplied in bfloat16 where the processor can.
//
// Letters: Q query_len, T rows, H heads, K KV heads, G = H / K (query heads of one KV head), D head_dim.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

namespace ring {

// Integers with a scale for every `head_dim` of them. `+` advances by elements, as a pointer does; only multiples of
// `head_dim` are valid.
struct Int8Rows {
  const int8_t* integers;
  const float* scales;
  int64_t head_dim;

  Int8Rows operator+(int64_t numbers) const { return {integers + numbers, scales + numbers / head_dim, head_dim}; }
};

template <typename E>
struct Forms {
  using Rows = const E*;
  using Out = E*;
};
template <>
struct Forms<int8_t> {
  using Rows = Int8Rows;
  using Out = float*;
};

// `E` is the type of queries, keys, values and result: float or Half, or int8_t with a float result.
template <typename E>
struct Attention {
  int64_t query_len, rows, num_heads, num_kv_heads, head_dim;
  typename Forms<E>::Rows query;   // [Q, H, D]
  typename Forms<E>::Rows keys;    // [T, K, D]
  typename Forms<E>::Rows values;  // [T, K, D]
  const float* mask;               // [Q, T], added to the scores, or null; -1e30 and below hides a row
  int64_t start;                   // without a mask: where the chunk stands among the rows
  bool causal;                     // without a mask: query i sees rows 0 .. start + i, or all of 0 .. start + Q - 1
  float scale;                     // of the scores
  typename Forms<E>::Out out;      // [Q, H, D]

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t row_size() const { return num_kv_heads * head_dim; }
};

constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Runs `task(0) .. task(count - 1)`, in any order, and returns when all are done.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

// Rows hidden from every query are not read, so a row that was never written may hold anything. A query that sees no
// row gets zeros. The result does not depend on the number of threads.
template <typename E>
void attend(const Attention<E>& a, const Parallel& parallel);

}  // namespace ring
