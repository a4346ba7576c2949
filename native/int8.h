// Rows of int8 and their dot products with an int8 query.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention.h"
#include "half.h"
#include "vectors.h"

namespace ring {

constexpr int64_t kPart = 128;  // rows in a part
constexpr int kRowsAhead = 8;
constexpr int kRowsTogether = kRegisters == 32 ? 4 : 2;

// A row [D] as float32, written to `room`.
inline const float* as_floats(Int8Rows row, int64_t head_dim, float* room) {
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(room + d, load(row.integers + d) * *row.scales);
  for (; d < head_dim; ++d) room[d] = row.integers[d] * *row.scales;
  return room;
}

// The elements of rows; of int8 rows, without their scales.
template <typename E>
inline const E* numbers(const E* rows) { return rows; }
inline const int8_t* numbers(Int8Rows rows) { return rows.integers; }

typedef uint8_t Bytes __attribute__((vector_size(kWidth * 4)));

// Adds to every lane of `sums` the products of four elements of a key, to which kBias was added, with four of a query.
// x86 multiplies unsigned with signed integers: adding 128 makes the key unsigned.
#if defined(__AVX512VNNI__)
constexpr bool kIntegerDots = true;
constexpr uint8_t kBias = 128;
inline IntVec add_dots(IntVec sums, Bytes key, Bytes query) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)key, (__m512i)query);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr bool kIntegerDots = true;
constexpr uint8_t kBias = 128;
inline IntVec add_dots(IntVec sums, Bytes key, Bytes query) {
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)key, (__m256i)query);
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
constexpr bool kIntegerDots = true;
constexpr uint8_t kBias = 0;
inline IntVec add_dots(IntVec sums, Bytes key, Bytes query) {
  return (IntVec)vdotq_s32((int32x4_t)sums, (int8x16_t)key, (int8x16_t)query);
}
#else
constexpr bool kIntegerDots = false;
constexpr uint8_t kBias = 0;
IntVec add_dots(IntVec sums, Bytes key, Bytes query);
#endif

inline Bytes load_bytes(const int8_t* from, int64_t count = sizeof(Bytes)) {
  Bytes out = {};
  std::memcpy(&out, from, count);
  return out;
}

// dots[g * kPart + i] of rows i .. i + R - 1 with G heads of the query; sums start at `less` [G].
template <int G, int R>
inline void integer_dots(
    int64_t head_dim, int64_t row_size, const int8_t* query, const IntVec* less, const int8_t* const* keys,
    const int8_t* const* values, float* dots) {
  const Bytes bias = Bytes{} + kBias;
  IntVec sums[G * R];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[g * R + r] = less[g];
  }
  constexpr int64_t width = sizeof(Bytes);
  int64_t d = 0;
  for (; d + width <= head_dim; d += width) {
    if (d % 64 == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(keys[r] + kRowsAhead * row_size + d);
        __builtin_prefetch(values[r] + d);
      }
    }
    Bytes key[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) key[r] = load_bytes(keys[r] + d) + bias;
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Bytes q = load_bytes(query + g * head_dim + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[g * R + r] = add_dots(sums[g * R + r], key[r], q);
    }
  }
  if (d < head_dim) {
    for (int r = 0; r < R; ++r) {
      const Bytes key = load_bytes(keys[r] + d, head_dim - d) + bias;
      for (int g = 0; g < G; ++g) {
        sums[g * R + r] = add_dots(sums[g * R + r], key, load_bytes(query + g * head_dim + d, head_dim - d));
      }
    }
  }
  // Exact in float32 up to a head_dim of 1,000: a dot product of D numbers is at most 127 * 127 * D.
  Vec floats[G * R];
#pragma GCC unroll 16
  for (int i = 0; i < G * R; ++i) floats[i] = __builtin_convertvector(sums[i], Vec);
  store_sums<G, R>(floats, kPart, dots);
}

// Of `count` rows.
template <int G>
void integer_dots(
    int64_t head_dim, int64_t row_size, const int8_t* query, const int8_t* const* keys, const int8_t* const* values,
    int64_t count, float* dots) {
  const Bytes bias = Bytes{} + kBias;
  IntVec less[G] = {};
  for (int g = 0; g < G; ++g) {
    for (int64_t d = 0; d < head_dim; d += sizeof(Bytes)) {
      const int64_t left = head_dim - d;
      const int64_t length = left < int64_t(sizeof(Bytes)) ? left : int64_t(sizeof(Bytes));
      less[g] = add_dots(less[g], bias, load_bytes(query + g * head_dim + d, length));
    }
    less[g] = -less[g];
  }
  int64_t i = 0;
  for (; i + kRowsTogether <= count; i += kRowsTogether) {
    integer_dots<G, kRowsTogether>(head_dim, row_size, query, less, keys + i, values + i, dots + i);
  }
  for (; i < count; ++i) integer_dots<G, 1>(head_dim, row_size, query, less, keys + i, values + i, dots + i);
}

}  // namespace ring
