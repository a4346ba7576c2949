// IEEE 754's 16-bit floats, and vectors of them as float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace ring {

struct Half {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(int8_t value) { return value; }
inline float to_float(uint8_t value) { return value; }

inline float to_float(Half half) {
  const uint32_t sign = (half.bits & 0x8000u) << 16, rest = (half.bits & 0x7fffu) << 13;
  uint32_t bits = rest | 0x7f800000u;  // infinity or NaN
  if (rest < 0x0f800000u) {
    // The exponents' biases differ by 112. The product converts subnormals too.
    float value;
    std::memcpy(&value, &rest, sizeof(value));
    value *= 0x1p112f;
    std::memcpy(&bits, &value, sizeof(bits));
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

inline void from_float(float value, float* to) { *to = value; }

// To the nearest, ties to even.
inline void from_float(float value, Half* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t half;
  if (bits >= 0x47800000u) {  // 2^16 and above
    half = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (bits < 0x38800000u) {  // below 2^-14: adding 1/2 puts the rounding where the last bit will be
    float small;
    std::memcpy(&small, &bits, sizeof(small));
    small += 0.5f;
    std::memcpy(&half, &small, sizeof(half));
    half -= 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0x0fffu + ((bits >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign >> 16);
}

#if defined(__AVX512F__)
inline Vec load(const Half* from) {
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(Half* to, Vec value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline Vec load(const Half* from) {
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store(Half* to, Vec value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
inline Vec load(const Half* from) {
  float16x4_t lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return (Vec)vcvt_f32_f16(lanes);
}
inline void store(Half* to, Vec value) {
  const float16x4_t lanes = vcvt_f16_f32((float32x4_t)value);
  std::memcpy(to, &lanes, sizeof(lanes));
}
#else
inline Vec load(const Half* from) {
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = to_float(from[i]);
  return out;
}
inline void store(Half* to, Vec value) {
  for (int i = 0; i < kWidth; ++i) from_float(value[i], to + i);
}
#endif

// Converts `count` elements.
template <typename From, typename To>
inline void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
  for (; i < count; ++i) from_float(to_float(from[i]), to + i);
}

}  // namespace ring
