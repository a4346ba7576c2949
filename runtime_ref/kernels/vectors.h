// Vectors of floats as wide as the target's registers, on the vector extensions of GCC and Clang.
#pragma once

#include <cstdint>
#include <cstring>

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

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof(Vec)); }

inline Vec splat(float value) { return value - Vec{}; }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// The lower and the upper half of a vector of N floats, added.
template <int N>
inline auto folded(const float* lanes) {
  typedef float Half __attribute__((vector_size(N / 2 * sizeof(float))));
  Half low, high;
  std::memcpy(&low, lanes, sizeof(Half));
  std::memcpy(&high, lanes + N / 2, sizeof(Half));
  return low + high;
}

inline float sum(Vec value) {
  float lanes[kWidth];
  store(lanes, value);
  if constexpr (kWidth == 16) {
    const auto eight = folded<16>(lanes);
    std::memcpy(lanes, &eight, sizeof(eight));
  }
  if constexpr (kWidth >= 8) {
    const auto four = folded<8>(lanes);
    std::memcpy(lanes, &four, sizeof(four));
  }
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
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
