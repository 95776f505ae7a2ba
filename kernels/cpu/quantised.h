// What the quantised kernel does with one vector: a step along the depth for each weight type, and the rows' bytes.
// Weights are unsigned with a zero point, rows are signed: what vpdpbusd multiplies. Sums of products are integers, and
// so are exact: every processor, batch and order gives the same ones.
#pragma once

#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef int8_t Bytes __attribute__((vector_size(LINEAR_LANES)));

inline Ints splat_int(int32_t value) { return value - Ints{}; }

#if (defined(__AVX512BW__) || defined(__AVX2__)) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#if defined(__AVX512BW__)
inline Ints multiply_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
inline Ints odd_bytes(Ints v) { return (Ints)_mm512_srai_epi16((__m512i)v, 8); }
inline Ints even_bytes(Ints v) { return (Ints)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)v, 8), 8); }
#else
inline Ints multiply_pairs(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline Ints odd_bytes(Ints v) { return (Ints)_mm256_srai_epi16((__m256i)v, 8); }
inline Ints even_bytes(Ints v) { return (Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)v, 8), 8); }
#endif
#endif

// sum + the four products of unsigned bytes w and signed bytes x in every 32-bit lane.
inline Ints dot(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX512BW__) || defined(__AVX2__)  // in 16 bits: vpmaddubsw would saturate
  const Ints even = w & 0x00ff00ff, odd = bits<Ints>(bits<Words>(w) >> 8) & 0x00ff00ff;
  return sum + multiply_pairs(even, even_bytes(x)) + multiply_pairs(odd, odd_bytes(x));
#else
  for (int byte = 0; byte < 4; byte++) sum += ((w >> 8 * byte) & 255) * ((x << (24 - 8 * byte)) >> 24);
  return sum;
#endif
}

// ---- the two weight types, in panels of two vectors of columns: one step is four of the depth

constexpr int kVectors = 2;

struct Int8 {
  static constexpr bool kGrouped = false;
  static constexpr int32_t kZero = 128;  // how much larger the stored number is
  static constexpr int64_t kStepBytes = kVectors * sizeof(Ints);
  static void weights(const char* at, Ints* w) {
    w[0] = load<Ints>(at);
    w[1] = load<Ints>(at + sizeof(Ints));
  }
};

// The first vector's numbers are the low halves of the bytes.
struct Int4 {
  static constexpr bool kGrouped = true;
  static constexpr int32_t kZero = 8;
  static constexpr int64_t kStepBytes = sizeof(Ints);
  static void weights(const char* at, Ints* w) {
    const Ints both = load<Ints>(at);
    w[0] = both & 0x0f0f0f0f;
    w[1] = (both >> 4) & 0x0f0f0f0f;
  }
};

// ---- the rows

// The first `count` numbers; the others read as zero.
inline Floats widen(const float* from, int64_t count) {
  if (count >= kLanes) return load<Floats>(from);
  Floats v = {};
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

inline Floats widen(const uint16_t* from, int64_t count) {
  Halves half = {};
  if (count >= kLanes) half = load<Halves>(from);
  else std::memcpy(&half, from, count * sizeof(uint16_t));
  return bits<Floats>(__builtin_convertvector(half, Words) << 16);
}

// To the nearest integer, ties to even; the size must be below 2^22.
inline Ints rounded(Floats v) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  return bits<Ints>(v + magic) - bits<int32_t>(magic);
}

inline float largest(Floats v) {
  float most = 0;
  for (int i = 0; i < kLanes; i++) most = v[i] > most ? v[i] : most;
  return most;
}

inline float sum_of(Floats v) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

inline int32_t sum_of(Ints v) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

}  // namespace
