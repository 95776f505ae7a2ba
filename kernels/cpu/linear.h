// What the linear kernel does with one vector: a step along the depth for each weight type, activations, stores.
// Vectors are GCC's and clang's own, as wide as the processor's registers; only vdpbf16ps needs an intrinsic.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LINEAR_LANES 16
#define LINEAR_ROWS 12  // 12 x 2 accumulators, 2 weights and an input: 27 of 32 registers
#elif defined(__AVX__)
#define LINEAR_LANES 8
#define LINEAR_ROWS 6  // 6 x 2 accumulators, 2 weights and an input: 15 of 16 registers
#else
#define LINEAR_LANES 4
#define LINEAR_ROWS 6
#endif

namespace {

constexpr int kLanes = LINEAR_LANES;

typedef float Floats __attribute__((vector_size(4 * LINEAR_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LINEAR_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LINEAR_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LINEAR_LANES)));

enum Type : int32_t { kFloat32 = 0, kBfloat16 = 1 };
enum Activation : int32_t { kNone = 0, kRelu2 = 1, kTanh = 2, kSigmoid = 3 };

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class To>
inline To load(const void* from) {
  To result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

inline Floats splat(float value) { return value - Floats{}; }

// ---- the two weight types: what one step along the depth does

struct Float32 {
  using Element = float;
  using Weight = Floats;
  using Input = Floats;
  static constexpr int kStep = 1;
  static Input input(const Element* x) { return splat(*x); }
  static Input last(const Element* x) { return splat(*x); }
  static Floats step(Floats sum, Weight w, Input x) { return sum + w * x; }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  using Element = uint16_t;
  using Weight = __m512i;
  using Input = __m512i;
  static constexpr int kStep = 2;
  static Input input(const Element* x) { return _mm512_set1_epi32(load<int32_t>(x)); }
  static Input last(const Element* x) { return _mm512_set1_epi32(*x); }
  static Floats step(Floats sum, Weight w, Input x) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};
#else
struct Bfloat16 {
  using Element = uint16_t;
  using Weight = Words;
  struct Input {
    Floats even, odd;
  };
  static constexpr int kStep = 2;
  static float widen(uint16_t half) { return bits<float>(uint32_t(half) << 16); }
  static Input input(const Element* x) { return {splat(widen(x[0])), splat(widen(x[1]))}; }
  static Input last(const Element* x) { return {splat(widen(x[0])), Floats{}}; }
  static Floats step(Floats sum, Weight w, Input x) {
    sum = sum + bits<Floats>(w & 0xffff0000u) * x.odd;
    return sum + bits<Floats>(w << 16) * x.even;
  }
};
#endif

// ---- the epilogue

// exp(y) = scale * (1 + m): y = n ln 2 + r with |r| <= ln 2 / 2, m = exp(r) - 1 by its Taylor series (error < 2e-8).
struct Exponential {
  Floats m, scale;
  explicit Exponential(Floats y) {
    const Floats high = splat(88.0f), low = splat(-87.0f);  // keeps the scale a normal number; NaN passes
    y = y > high ? high : y;
    y = y < low ? low : y;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats shifted = y * 1.44269504088896341f + magic;
    const Floats n = shifted - magic;
    const Floats r = (y - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts (Cody and Waite)
    Floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    m = p * (r * r) + r;
    scale = bits<Floats>((bits<Ints>(shifted) - bits<int32_t>(magic) + 127) << 23);
  }
};

inline Floats relu2(Floats v) {
  const Floats positive = v < 0.0f ? Floats{} : v;
  return positive * positive;
}

inline Floats sigmoid(Floats v) {
  const Exponential e(-v);
  return 1.0f / (1.0f + (e.scale + e.scale * e.m));
}

// tanh |v| = e / (e + 2) with e = exp(2 |v|) - 1, which keeps its relative accuracy near zero.
inline Floats hyperbolic_tangent(Floats v) {
  const Words sign = bits<Words>(v) & 0x80000000u;
  Floats magnitude = bits<Floats>(bits<Words>(v) ^ sign);
  magnitude = magnitude > 10.0f ? splat(10.0f) : magnitude;  // tanh 10 rounds to 1
  const Exponential e(magnitude * 2.0f);
  const Floats minus_one = e.scale * e.m + (e.scale - 1.0f);
  return bits<Floats>(bits<Words>(minus_one / (minus_one + 2.0f)) | sign);
}

inline Floats activate(Floats v, int32_t activation) {
  switch (activation) {
    case kRelu2: return relu2(v);
    case kTanh: return hyperbolic_tangent(v);
    case kSigmoid: return sigmoid(v);
    default: return v;
  }
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN. The processor's own instruction takes numbers below the
// normal ones for zero, as its products do.
inline Halves to_bfloat16(Floats v) {
#if defined(__AVX512BF16__)
  return bits<Halves>(_mm512_cvtneps_pbh((__m512)v));
#else
  const Words b = bits<Words>(v);
  const Words rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const Words quiet = (b >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet, Halves);
#endif
}

template <class Element, class Vector>
inline void store(Element* to, Vector v, int64_t count) {
  if (count >= kLanes) std::memcpy(to, &v, sizeof v);
  else std::memcpy(to, &v, count * sizeof(Element));
}

}  // namespace
