// Which tokens of a row can be drawn: a scan of the logits in blocks, and selection without sorting the vocabulary.
#pragma once

#include <algorithm>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "sampling_math.h"

namespace sampling {

constexpr int BLOCK = 64;
// Tokens further below the best one than this many temperatures weigh less than 1e-27 of it and are left out.
constexpr double REACH = 64.0;

// Working memory of one thread, kept from row to row so that nothing is allocated in the steady state.
struct Scratch {
    std::vector<float> block_max, block_sum;      // per block: the largest logit; sum of exp((l - largest) / T)
    std::vector<double> block_mass;               // per block: sum of exp((l - m) / T)
    std::vector<float> raw;                       // candidates' logits, before they are widened into y
    std::vector<float> hidden;                    // logits of penalised tokens while the row holds -inf there
    std::vector<double> penalised;                // their penalised logits
    std::vector<double> y, weight;                // candidates: penalised logits; exp((y - m) / T)
    std::vector<double> pool_y, pool_weight;      // what find_cut has not decided on yet
    std::vector<int32_t> id, chosen;              // candidates' ids; blocks that hold some
    float tail[BLOCK];

    void reserve(int vocabulary, int count) {
        const size_t blocks = (vocabulary + BLOCK - 1) / BLOCK + 16, tokens = vocabulary + 2 * BLOCK;
        if (block_max.size() < blocks) {
            block_max.resize(blocks), block_sum.resize(blocks);
            block_mass.resize(blocks), chosen.resize(blocks);
        }
        if (penalised.size() < (size_t)count + 16) penalised.resize(2 * count + 16), hidden.resize(2 * count + 16);
        if (id.size() < tokens) id.resize(tokens), raw.resize(tokens), y.resize(tokens), weight.resize(tokens);
    }
};

// One row of logits cut into blocks; the last one is padded with -inf.
struct Blocks {
    const float* logits;
    int vocabulary, count;
    Scratch& scratch;

    Blocks(const float* logits, int vocabulary, Scratch& scratch)
        : logits(logits), vocabulary(vocabulary), count((vocabulary + BLOCK - 1) / BLOCK), scratch(scratch) {
        const int whole = vocabulary / BLOCK * BLOCK;
        std::fill(scratch.tail, scratch.tail + BLOCK, -FLOAT_INF);
        std::copy(logits + whole, logits + vocabulary, scratch.tail);
    }

    const float* block(int b) const {
        return (b + 1) * BLOCK <= vocabulary ? logits + (size_t)b * BLOCK : scratch.tail;
    }

    // Fills block_max and, with `sums`, block_sum. Returns the largest logit; NaN if there is one in the row.
    float scan(bool sums, double temperature) {
        I32x16 not_numbers{};
        float best = -FLOAT_INF;
        const float scale = (float)(LOG2E / temperature);
        for (int b = 0; b < count; ++b) {
            const float* l = block(b);
            const auto v0 = load<F32x16>(l), v1 = load<F32x16>(l + 16);
            const auto v2 = load<F32x16>(l + 32), v3 = load<F32x16>(l + 48);
            not_numbers |= (v0 != v0) | (v1 != v1) | (v2 != v2) | (v3 != v3);
            const float top = largest(larger(larger(v0, v1), larger(v2, v3)));
            scratch.block_max[b] = top;
            best = top > best ? top : best;
            if (!sums) continue;
            const float base = top > -std::numeric_limits<float>::max() ? top : -std::numeric_limits<float>::max();
            scratch.block_sum[b] = total((exp2_float((v0 - base) * scale) + exp2_float((v1 - base) * scale)) +
                                         (exp2_float((v2 - base) * scale) + exp2_float((v3 - base) * scale)));
        }
        return total(not_numbers) ? std::numeric_limits<float>::quiet_NaN() : best;
    }

    // Fills block_mass with sums of exp((l - m) / T) and returns their total. The few blocks that hold much of it are
    // summed again in double, so that rounding hardly ever moves a draw.
    double weigh(double m, double temperature) {
        const double scale = LOG2E / temperature;
        double mass = 0;
        for (int b = 0; b < count; b += 8) {
            const F64x8 x = (widen(&scratch.block_max[b]) - m) * scale;
            store(&scratch.block_mass[b], exp2_double(x) * widen(&scratch.block_sum[b]));
        }
        for (int b = 0; b < count; ++b) mass += scratch.block_mass[b];
        const double heavy = mass / 256;
        mass = 0;
        for (int b = 0; b < count; ++b) {
            if (scratch.block_mass[b] >= heavy) scratch.block_mass[b] = weigh_block(b, m, scale);
            mass += scratch.block_mass[b];
        }
        return mass;
    }

    double weigh_block(int b, double m, double scale) const {
        F64x8 sum{};
        for (int i = 0; i < BLOCK; i += 8) sum += exp2_double((widen(block(b) + i) - m) * scale);
        return total(sum);
    }

    int count_blocks(float threshold) const {
        int found = 0;
        for (int b = 0; b < count; ++b) found += scratch.block_max[b] >= threshold;
        return found;
    }

    // A threshold that at least `wanted` logits reach, little above `wanted` of them when logits are in no order;
    // `lowest` if there are fewer. The maxima of as many blocks stand for them, found by bisection.
    float threshold(int64_t wanted, float lowest, float best) const {
        if (wanted > count / 2 || count_blocks(lowest) < wanted) return lowest;
        if (count_blocks(best) >= wanted) return best;
        float low = lowest, high = best;
        for (int step = 0; step < 24; ++step) {
            const float middle = low + (high - low) * 0.5f;
            const int found = count_blocks(middle);
            (found >= wanted ? low : high) = middle;
            if (found >= wanted && found <= wanted + wanted / 8) break;
        }
        return low;
    }

    // Puts the logits that reach the threshold into id and y, in the order of ids. Returns how many.
    int gather(float threshold) {
        int blocks = 0, found = 0;
        for (int b = 0; b < count; ++b) {
            scratch.chosen[blocks] = b;
            blocks += scratch.block_max[b] >= threshold;
        }
        for (int i = 0; i < blocks; ++i) found = gather_block(scratch.chosen[i], threshold, found);
        for (int i = 0; i < found; i += 8) store(&scratch.y[i], widen(&scratch.raw[i]));
        return found;
    }

    // Without branches on the data: every lane is written, and those that count move the end on.
    int gather_block(int b, float threshold, int found) {
        const float* l = block(b);
#ifdef __AVX512F__
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        for (int i = 0; i < BLOCK; i += 16) {
            const __m512 v = _mm512_loadu_ps(l + i);
            const __mmask16 hits = _mm512_cmp_ps_mask(v, _mm512_set1_ps(threshold), _CMP_GE_OQ);
            const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32(b * BLOCK + i));
            _mm512_storeu_si512(&scratch.id[found], _mm512_maskz_compress_epi32(hits, ids));
            _mm512_storeu_ps(&scratch.raw[found], _mm512_maskz_compress_ps(hits, v));
            found += __builtin_popcount(hits);
        }
#else
        for (int i = 0; i < BLOCK; ++i) {
            scratch.id[found] = b * BLOCK + i;
            scratch.raw[found] = l[i];
            found += l[i] >= threshold;
        }
#endif
        return found;
    }
};

// Where a descending walk over the tokens ends.
struct Cut {
    double value;      // the largest t that reaches the bound, else the smallest value there is
    double above;      // mass of the tokens above it
    int64_t n_above;   // how many they are
    int64_t n_equal;   // tokens at t
    double weight;     // of one token at t
};

// What lies above a pivot, and at it.
struct Split {
    double mass_above;
    int64_t n_above, n_equal;
};

// The arrays are read up to the next multiple of 8, where y must be NaN.
inline Split split(const double* y, const double* weight, int n, double pivot) {
    F64x8 mass{};
    I64x8 n_above{}, n_equal{};
    for (int i = 0; i < n; i += 8) {
        const auto v = load<F64x8>(y + i);
        const I64x8 above = v > pivot;
        mass += above ? load<F64x8>(weight + i) : F64x8{};
        n_above -= above;
        n_equal -= v == pivot;
    }
    return {total(mass), total(n_above), total(n_equal)};
}

// Finds the cut of n > 0 values where {y >= t} holds `most` tokens or the mass `enough`: quickselect, a few n steps.
// Equal values have equal weights.
inline Cut find_cut(Scratch& s, int n, int64_t most, double enough) {
    s.pool_y.assign(s.y.begin(), s.y.begin() + n + 8);
    s.pool_weight.assign(s.weight.begin(), s.weight.begin() + n + 8);
    double *y = s.pool_y.data(), *w = s.pool_weight.data();
    Cut cut{0, 0, 0, 0, 0};
    for (;;) {
        std::fill(y + n, y + n + 8, std::numeric_limits<double>::quiet_NaN());
        const int first = y[0] < y[n - 1] ? 0 : n - 1, second = n - 1 - first;  // the median of three
        const int at = y[n / 2] < y[first] ? first : y[n / 2] > y[second] ? second : n / 2;
        const double pivot = y[at], weight = w[at];
        const Split part = split(y, w, n, pivot);
        const bool upper = cut.n_above + part.n_above >= most || cut.above + part.mass_above >= enough;
        const int64_t n_reached = cut.n_above + part.n_above + part.n_equal;
        const double mass_reached = cut.above + part.mass_above + part.n_equal * weight;
        const bool here = n_reached >= most || mass_reached >= enough || part.n_above + part.n_equal == n;
        if (!upper && here)
            return {pivot, cut.above + part.mass_above, cut.n_above + part.n_above, part.n_equal, weight};
        if (!upper) cut.n_above = n_reached, cut.above = mass_reached;
        int kept = 0;
        for (int i = 0; i < n; ++i) {
            const double value = y[i], mass = w[i];
            y[kept] = value, w[kept] = mass;
            kept += upper ? value > pivot : value < pivot;
        }
        n = kept;
    }
}

}  // namespace sampling
