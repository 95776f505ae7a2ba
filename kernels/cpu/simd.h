// Vectors of 16 floats over GCC's vector extension: one AVX512 register, or several smaller ones elsewhere.
//
// Numbers in memory are float, Half (fp16) or Brain (bf16). Every function does the same operations on every lane and
// `fused` rounds once wherever the processor can, so that a result does not depend on the code around it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own intrinsics set them off
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define SIMD static inline __attribute__((always_inline))

namespace simd {

constexpr int64_t kLanes = 16;
constexpr float kHalfMax = 65504.0f;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

template <class To, class From>
SIMD To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

SIMD Vec splat(float value) { return value - Vec{}; }

// a * b + c
SIMD Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FP_FAST_FMAF) || defined(__FMA__)
  for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// The smaller and the larger of a limit and a number; NaN stays NaN.
SIMD Vec at_most(Vec limit, Vec v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)limit, (__m512)v);  // the second operand passes when one is NaN
#else
  return v > limit ? limit : v;
#endif
}

SIMD Vec at_least(Vec limit, Vec v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)limit, (__m512)v);
#else
  return v < limit ? limit : v;
#endif
}

SIMD float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lane[kLanes];
  std::memcpy(lane, &v, sizeof v);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
#endif
}

// y = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor series, error below 1e-8. NaN passes.
SIMD Vec exponential(Vec y) {
  y = at_least(splat(-87.0f), at_most(splat(88.0f), y));  // the scale stays a normal number
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec shifted = fused(y, splat(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  const Vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), y));  // ln 2 in two parts
  Vec p = splat(1.0f / 5040);
  p = fused(p, r, splat(1.0f / 720));
  p = fused(p, r, splat(1.0f / 120));
  p = fused(p, r, splat(1.0f / 24));
  p = fused(p, r, splat(1.0f / 6));
  p = fused(p, r, splat(0.5f));
  p = fused(p, r, splat(1.0f));
  p = fused(p, r, splat(1.0f));
  return p * bits<Vec>((bits<Ints>(shifted) - bits<Ints>(magic) + 127) << 23);
}

SIMD Vec sigmoid(Vec v) { return 1.0f / (1.0f + exponential(-v)); }

// ---- numbers in memory: widen 16 of them, or round 16 floats to nearest even

SIMD Vec widen(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

SIMD void narrow(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

SIMD Shorts shorts(const void* from) {
  Shorts s;
  std::memcpy(&s, from, sizeof s);
  return s;
}

SIMD Vec widen(const Brain* from) { return bits<Vec>(__builtin_convertvector(shorts(from), Words) << 16); }

SIMD void narrow(Brain* to, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  const Words b = bits<Words>(v);
  const Words rounded = v == v ? b + 0x7fffu + ((b >> 16) & 1u) : b | 0x400000u;
  const Shorts s = __builtin_convertvector(rounded >> 16, Shorts);
  std::memcpy(to, &s, sizeof s);
#endif
}

SIMD Vec widen(const Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  const Words half = __builtin_convertvector(shorts(from), Words);
  const Vec scaled = bits<Vec>((half & 0x7fffu) << 13) * 0x1p112f;  // moves the exponent's bias from 15 to 127
  const Words infinite = (half & 0x7c00u) == 0x7c00u ? Words{} + 0x7f800000u : Words{};
  return bits<Vec>(bits<Words>(scaled) | infinite | (half & 0x8000u) << 16);
#endif
}

SIMD Vec widen(const int8_t* from) {
  Bytes b;
  std::memcpy(&b, from, sizeof b);
  return __builtin_convertvector(b, Vec);
}

// Values beyond the range become the largest one, NaN stays NaN.
SIMD void narrow(Half* to, Vec v) {
#if defined(__AVX512F__)
  const Vec held = at_least(splat(-kHalfMax), at_most(splat(kHalfMax), v));
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)held, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Words sign = bits<Words>(v) & 0x80000000u;
  const Vec size = at_most(splat(kHalfMax), bits<Vec>(bits<Words>(v) ^ sign));
  const Words b = bits<Words>(size);
  const Words normal = (b - (112u << 23) + 0xfffu + ((b >> 13) & 1u)) >> 13;
  const Words tiny = bits<Words>(size + 0.5f) - bits<Words>(splat(0.5f));  // the addition rounds at half's last place
  Words half = size < 0x1p-14f ? tiny : normal;
  half = size == size ? half : Words{} + 0x7e00u;
  const Shorts s = __builtin_convertvector(half | sign >> 16, Shorts);
  std::memcpy(to, &s, sizeof s);
#endif
}

// The first `lanes` of 16 numbers; the others read as zero and are not written.
template <class T>
SIMD Vec load(const T* from, int64_t lanes) {
  if (lanes >= kLanes) return widen(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, lanes * sizeof(T));
  return widen(padded);
}

template <class T>
SIMD void store(T* to, Vec v, int64_t lanes) {
  if (lanes >= kLanes) return narrow(to, v);
  T padded[kLanes];
  narrow(padded, v);
  std::memcpy(to, padded, lanes * sizeof(T));
}

// Stores numbers whose type has no infinity among them: `store` many, and `hold` all of them again if some `passed`.
// For Half on AVX512 this is cheaper than to limit each number, which takes the units that convert.
template <class T>
struct Saturation {
  void store(T* to, Vec v, int64_t lanes) { simd::store(to, v, lanes); }
  bool passed() const { return false; }
  void hold(T*, int64_t) {}
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
template <>
struct Saturation<Half> {
  __m256i largest = _mm256_setzero_si256();  // twice the bits, which loses the sign

  void store(Half* to, Vec v, int64_t lanes) {
    if (lanes < kLanes) return simd::store(to, v, lanes);
    const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    largest = _mm256_max_epu16(largest, _mm256_add_epi16(half, half));
    _mm256_storeu_si256((__m256i*)to, half);
  }
  bool passed() const {
    return _mm256_cmpge_epu16_mask(largest, _mm256_set1_epi16(int16_t(2 * 0x7c00))) != 0;
  }
  void hold(Half* to, int64_t lanes) {
    if (lanes >= kLanes) narrow(to, widen(to));
  }
};
#endif

}  // namespace simd
