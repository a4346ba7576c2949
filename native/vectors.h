// Vectors of floats as wide as the target's registers, on the vector extensions of GCC and Clang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ring {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRegisters = 16;
#else  // NEON, SSE
constexpr int kWidth = 4;
constexpr int kRegisters = 32;
#endif

typedef float Vec __attribute__((vector_size(kWidth * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kWidth * sizeof(float))));

inline Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof(Vec));
  return out;
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  // GCC compiles the line below to four scalar conversions.
  uint32_t lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(lanes))))));
#else
  typedef int8_t Narrow __attribute__((vector_size(kWidth)));
  Narrow lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return __builtin_convertvector(lanes, Vec);
#endif
}

inline Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  uint32_t lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return (Vec)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(lanes))))));
#else
  typedef uint8_t Narrow __attribute__((vector_size(kWidth)));
  Narrow lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return __builtin_convertvector(lanes, Vec);
#endif
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof(Vec)); }

inline Vec splat(float value) { return value - Vec{}; }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Neighbours of `a` added, then those of `b`.
template <size_t... I>
inline Vec pair_sums(Vec a, Vec b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
#else
  return __builtin_shuffle(a, b, IntVec{int32_t(2 * I)...}) + __builtin_shuffle(a, b, IntVec{int32_t(2 * I + 1)...});
#endif
}

// Lane i is the sum of the lanes of vectors[i]; lanes from `count` on are zero. `vectors` is overwritten.
inline Vec sums_of(Vec (&vectors)[kWidth], int count) {
#pragma GCC unroll 8
  for (int left = kWidth / 2; left; left /= 2) {
    count = (count + 1) / 2;
#pragma GCC unroll 8
    for (int i = 0; i < left; ++i) {
      if (i < count) {
        vectors[i] = pair_sums(vectors[2 * i], vectors[2 * i + 1], std::make_index_sequence<kWidth>());
      } else {
        vectors[i] = Vec{};
      }
    }
  }
  return vectors[0];
}

// to[g * stride + r] is the sum of the lanes of vectors[g * R + r].
template <int G, int R>
inline void store_sums(const Vec (&vectors)[G * R], int64_t stride, float* to) {
  float totals[(G * R + kWidth - 1) / kWidth * kWidth];
#pragma GCC unroll 4
  for (int begin = 0; begin < G * R; begin += kWidth) {
    const int count = G * R - begin < kWidth ? G * R - begin : kWidth;
    Vec some[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) some[i] = i < count ? vectors[begin + i] : Vec{};
    store(totals + begin, sums_of(some, count));
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) std::memcpy(to + g * stride, totals + g * R, R * sizeof(float));
}

inline float sum(Vec value) {
  float total = 0.0f;
  for (int i = 0; i < kWidth; ++i) total += value[i];
  return total;
}

inline float largest_of(Vec value) {
  float most = value[0];
  for (int i = 1; i < kWidth; ++i) most = value[i] > most ? value[i] : most;
  return most;
}

// 2^x for x <= 0, and exactly 0 below 2^-126 (minus infinity included). The polynomial is the Taylor series of 2^f on
// [-1/2, 1/2] to the seventh power, whose remainder is below a unit in the last place of float32.
inline Vec exp2_nonpositive(Vec x) {
  const Vec lowest = splat(-126.0f);
  const Vec clamped = larger(x, lowest);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);
  Vec p = splat(1.52527338e-5f);
  p = p * f + splat(1.54035304e-4f);
  p = p * f + splat(1.33335581e-3f);
  p = p * f + splat(9.61812911e-3f);
  p = p * f + splat(5.55041087e-2f);
  p = p * f + splat(2.40226507e-1f);
  p = p * f + splat(6.93147181e-1f);
  p = p * f + splat(1.0f);
  IntVec bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  IntVec exponent = (bits - 0x4B400000 + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return x < lowest ? Vec{} : p * scale;
}

}  // namespace ring
