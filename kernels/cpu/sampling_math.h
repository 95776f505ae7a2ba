// Vector arithmetic of the samplers: exp in float and double, reductions, and the Philox random numbers.
// Written with the compiler's vector types, which become AVX-512, AVX2 or NEON code, whichever there is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// On machines without AVX-512 GCC notes that vectors of 64 bytes have no fixed calling convention; ours stay in here.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace sampling {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef double F64x8 __attribute__((vector_size(64)));
typedef int64_t I64x8 __attribute__((vector_size(64)));
typedef float F32x8 __attribute__((vector_size(32)));

constexpr float FLOAT_INF = std::numeric_limits<float>::infinity();
constexpr double DOUBLE_INF = std::numeric_limits<double>::infinity();

template <class Vector, class Scalar>
static inline Vector load(const Scalar* source) {
    Vector v;
    std::memcpy(&v, source, sizeof(v));
    return v;
}

template <class Vector, class Scalar>
static inline void store(Scalar* target, Vector v) {
    std::memcpy(target, &v, sizeof(v));
}

static inline F32x16 splat(float x) { return x - F32x16{}; }
static inline F64x8 splat(double x) { return x - F64x8{}; }

static inline F32x16 larger(F32x16 a, F32x16 b) { return a > b ? a : b; }

// Reductions: halve the vector by swapping its halves, in registers where the compiler can shuffle.
template <class Combine>
static inline F32x16 fold(F32x16 v, Combine combine) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
    for (int width = 8; width > 0; width /= 2) {
        F32x16 swapped = v;
        for (int i = 0; i < width; ++i) swapped[i] = v[i + width];
        v = combine(v, swapped);
    }
    return v;
#endif
}

static inline float largest(F32x16 v) { return fold(v, larger)[0]; }

static inline float total(F32x16 v) {
    return fold(v, [](F32x16 a, F32x16 b) { return a + b; })[0];
}

template <class Vector>
static inline auto total(Vector v) {
    auto sum = v[0];
    for (size_t i = 1; i < sizeof(v) / sizeof(v[0]); ++i) sum += v[i];
    return sum;
}

// 2^x for x <= 0 in float, about 1e-7 relative; below -115 it stays at 2^-115. A power of two times a polynomial on
// [-1/2, 1/2], interpolated at the Chebyshev points (error 2e-8). exp(x / T) = 2^(x * LOG2E / T).
static inline F32x16 exp2_float(F32x16 x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
    x = larger(x, splat(-115.0f));
    const F32x16 shifted = x + magic;
    const F32x16 r = x - (shifted - magic);
    F32x16 p = r * 0x1.44402p-13f + 0x1.5f48eep-10f;
    p = p * r + 0x1.3b2a1cp-7f;
    p = p * r + 0x1.c6aeccp-5f;
    p = p * r + 0x1.ebfbep-3f;
    p = p * r + 0x1.62e43p-1f;
    p = p * r + 1.0f;
    return (F32x16)((I32x16)p + ((I32x16)shifted << 23));
}

// 2^x for x <= 0 in double, about 3e-16 relative; 0 below -1000. Built in the same way.
static inline F64x8 exp2_double(F64x8 x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52
    const I64x8 alive = x > -1000.0;
    x = alive ? x : splat(-1000.0);
    const F64x8 shifted = x + magic;
    const F64x8 r = x - (shifted - magic);
    F64x8 p = r * 0x1.e6065f532c950p-28 + 0x1.b675df26cbf5ep-24;
    p = p * r + 0x1.62bfd46781ef6p-20;
    p = p * r + 0x1.ffcb53e3aafe9p-17;
    p = p * r + 0x1.4309130975155p-13;
    p = p * r + 0x1.5d87fe9d85abep-10;
    p = p * r + 0x1.3b2ab6fba1dc6p-7;
    p = p * r + 0x1.c6b08d703cdf2p-5;
    p = p * r + 0x1.ebfbdff82c598p-3;
    p = p * r + 0x1.62e42fefa3a19p-1;
    p = p * r + 1.0;
    const F64x8 y = (F64x8)((I64x8)p + ((I64x8)shifted << 52));
    return alive ? y : F64x8{};
}

constexpr double LOG2E = 1.4426950408889634;

static inline F64x8 widen(const float* source) { return __builtin_convertvector(load<F32x8>(source), F64x8); }

// Philox4x32-10 (Salmon et al., 2011) with counter (position, row, 0, 0); u = (x0 + 0.5) * 2^-32, never 0 or 1.
static inline double uniform(uint64_t seed, uint32_t position, uint32_t row) {
    uint32_t c0 = position, c1 = row, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        const uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)b, c2 = n2, c3 = (uint32_t)a;
    }
    return (c0 + 0.5) * 0x1p-32;
}

}  // namespace sampling
