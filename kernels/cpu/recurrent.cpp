// The recurrence of RWKV-7 between its linear operators; kernels/reference.py says what each function computes.
//
// A state is a matrix per head, key-major: a row per key, with the values side by side in vector lanes, so that no sum
// runs across a vector. One sweep over it per token does all the work: it applies the update of the token before and
// takes the two products that the current token needs, S kk and the decayed S r, from which y follows without another
// sweep. While a row's tokens run, the state stays in a float buffer. Rows share nothing, and a chunk boundary changes
// no operation: with float states it changes no bit.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "simd.h"

using namespace simd;

extern "C" {

// kernels/recurrent.py has the same fields.
struct RecurrentRows {
  int64_t tokens, rows, threads;
  const int32_t *offsets, *slots;
};

struct RecurrentNorm {
  int64_t width;
  const float *weight, *bias;
};

struct RecurrentHeads {
  int64_t heads, size;
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k, *norm_weight, *norm_bias;
};

// Elements of [tokens, heads * size] in the compute type; v_mix is null in the first layer.
struct RecurrentGiven {
  const void *r, *k, *v, *w, *a, *g, *v_mix;
};
}

namespace {

constexpr float kNormEps = 1e-5f, kHeadEps = 64e-5f, kLeastLength = 1e-12f;
constexpr float kHalfE = 0.60653065971263342f;  // exp(-1/2)
constexpr int64_t kSmallWork = 64 * 1024;       // elements touched below which a second thread costs more than it brings

constexpr int64_t kTokensAhead = 4;

enum Type : int32_t { kFloat = 0, kBrain = 1, kHalf = 2, kByte = 3 };

// Calls run(Float{}), run(Brain{}) or run(Half{}).
template <class Run>
void with_type(int32_t type, Run run) {
  if (type == kBrain) run(Brain{});
  else if (type == kHalf) run(Half{});
  else run(float{});
}

// Calls run(from, to) on parts of 0..count.
template <class Run>
void in_parts(int64_t count, int64_t work, int64_t threads, Run run) {
  threads = std::min({threads, count, 1 + work / kSmallWork});
  if (threads <= 1) return run(0, count);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t part = 0; part < threads; part++) run(count * part / threads, count * (part + 1) / threads);
}

// ---- norms

// x += delta
template <class T>
void add(float* x, const T* delta, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes)
    store(x + i, load(x + i, width - i) + load(delta + i, width - i), width - i);
}

struct Moments {
  float mean, scale;  // scale = 1 / sqrt(variance + eps)
};

// The sum over x of term(x, sum so far), in four chains of additions: one would wait for itself.
template <class Term>
Vec total(const float* x, int64_t width, Term term) {
  Vec chains[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) chains[c] = term(widen(x + i + c * kLanes), chains[c]);
  for (; i + kLanes <= width; i += kLanes) chains[0] = term(widen(x + i), chains[0]);
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

Moments moments(const float* x, int64_t width, float eps) {
  const int64_t whole = width / kLanes * kLanes;
  float rest = 0, squares = 0;
  for (int64_t i = whole; i < width; i++) rest += x[i];
  const float mean = (sum(total(x, whole, [](Vec v, Vec so_far) { return so_far + v; })) + rest) / float(width);
  for (int64_t i = whole; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
  squares += sum(total(x, whole, [mean](Vec v, Vec so_far) { return fused(v - mean, v - mean, so_far); }));
  return {mean, 1.0f / std::sqrt(squares / float(width) + eps)};
}

template <class T>
void normalise(const RecurrentNorm& norm, const float* x, T* out) {
  const Moments m = moments(x, norm.width, kNormEps);
  for (int64_t i = 0; i < norm.width; i += kLanes) {
    const int64_t lanes = norm.width - i;
    const Vec d = (load(x + i, lanes) - m.mean) * m.scale;
    store(out + i, fused(d, load(norm.weight + i, lanes), load(norm.bias + i, lanes)), lanes);
  }
}

// Rows of x, each times its scale if there are scales.
struct Source {
  const void* x;
  int32_t type;
  const float* scales;
  const int64_t* positions;  // which rows; null for all
};

template <class X>
void copy_row(const X* x, float scale, int64_t width, float* to) {
  for (int64_t i = 0; i < width; i += kLanes) store(to + i, load(x + i, width - i) * scale, width - i);
}

void read_row(const Source& from, int64_t s, int64_t width, float* to) {
  const int64_t row = from.positions ? from.positions[s] : s;
  const float scale = from.scales ? from.scales[row] : 1.0f;
  if (from.type == kByte) copy_row((const int8_t*)from.x + row * width, scale, width, to);
  else with_type(from.type, [&](auto type) { copy_row((const decltype(type)*)from.x + row * width, scale, width, to); });
}

template <class T>
void norm_rows(const RecurrentNorm& norm, const Source& source, const void* delta, int32_t delta_type, int64_t from,
               int64_t to, T* out) {
  std::vector<float> row(norm.width);
  for (int64_t s = from; s < to; s++) {
    read_row(source, s, norm.width, row.data());
    if (delta) with_type(delta_type, [&](auto type) {
      add(row.data(), (const decltype(type)*)delta + s * norm.width, norm.width);
    });
    normalise(norm, row.data(), out + s * norm.width);
  }
}

// ---- token shift

template <class T>
void mix(const float* h, const float* before, const float* mixes, int64_t count, int64_t width, T* out,
         int64_t out_stride) {
  for (int64_t c = 0; c < width; c += kLanes) {
    const int64_t lanes = width - c;
    const Vec now = load(h + c, lanes), change = load(before + c, lanes) - now;
    for (int64_t i = 0; i < count; i++)
      store(out + i * out_stride + c, fused(change, load(mixes + i * width + c, lanes), now), lanes);
  }
}

template <class T>
void shift_mix(const RecurrentNorm& norm, const RecurrentRows& rows, const float* mixes, int64_t count, float* x,
               const T* delta, float* shift, T* out) {
  static thread_local std::vector<float> normed;
  const int64_t width = norm.width, work = rows.tokens * width;
  normed.resize(std::max<size_t>(normed.size(), work));
  float* const h = normed.data();
  in_parts(rows.tokens, work * 2, rows.threads, [&](int64_t from, int64_t to) {
    for (int64_t t = from * width; t < to * width; t += width) {
      if (delta) add(x + t, delta + t, width);
      normalise(norm, x + t, h + t);
    }
  });
  in_parts(rows.tokens, work * (1 + count), rows.threads, [&](int64_t from, int64_t to) {
    int64_t row = std::upper_bound(rows.offsets, rows.offsets + rows.rows, from) - rows.offsets - 1;
    for (int64_t t = from; t < to; t++) {
      if (t == rows.offsets[row + 1]) row++;
      const float* before = t == rows.offsets[row] ? shift + rows.slots[row] * width : h + (t - 1) * width;
      mix(h + t * width, before, mixes, count, width, out + t * width, work);
    }
  });
  in_parts(rows.rows, rows.rows * width, rows.threads, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++)
      std::memcpy(shift + rows.slots[row] * width, h + (rows.offsets[row + 1] - 1) * width, width * sizeof(float));
  });
}

// ---- the heads

// The head size, as a constant where it is known (SIZE > 0).
template <int SIZE>
struct Shape {
  int64_t given;
  int64_t size() const { return SIZE ? SIZE : given; }
  int64_t padded() const { return (size() + kLanes - 1) / kLanes * kLanes; }
  int64_t lanes(int64_t at) const { return SIZE % kLanes == 0 && SIZE ? kLanes : size() - at; }
};

// What one token does to a head: arrays of the padded head size, and sums over them.
struct Token {
  float *decay, *k, *kk_a, *minus_kk, *decay_r;  // over keys
  float *v, *removed, *y;                        // over values; removed = S . -kk
  float kk_a_r, k_r, bonus;
  static constexpr int kArrays = 8;
  Token(float* memory, int64_t padded)
      : decay(memory), k(decay + padded), kk_a(k + padded), minus_kk(kk_a + padded), decay_r(minus_kk + padded),
        v(decay_r + padded), removed(v + padded), y(removed + padded) {}
};

template <class T, int SIZE>
struct Head {
  Shape<SIZE> shape;
  const RecurrentHeads& weights;
  const RecurrentGiven& given;
  int64_t channel, width;  // the head's first channel, and the model's width

  Vec input(const void* from, int64_t token, int64_t i) const {
    const T* const here = (const T*)from + token * width + channel + i;
    __builtin_prefetch(here + kTokensAhead * width);  // a head's inputs lie a model's width apart
    return load(here, shape.lanes(i));
  }
  Vec weight(const float* from, int64_t i) const { return load(from + channel + i, shape.lanes(i)); }

  Vec values(int64_t token, int64_t i, T* v_first) const {
    const Vec v = input(given.v, token, i);
    T* const first = v_first + token * width + channel + i;
    __builtin_prefetch(first + kTokensAhead * width, 1);
    if (!given.v_mix) {
      store(first, v, shape.lanes(i));
      return v;
    }
    const Vec share = sigmoid(weight(weights.v0, i) + input(given.v_mix, token, i));
    return fused(load(first, shape.lanes(i)) - v, share, v);
  }

  void prepare(Token& t, int64_t token, T* v_first) const {
    const int64_t padded = shape.padded();
    Vec squares = {}, bonus = {}, k_r = {}, kk_a_r = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec r = input(given.r, token, i), key = input(given.k, token, i);
      const Vec a = sigmoid(weight(weights.a0, i) + input(given.a, token, i));
      const Vec decay = exponential(-kHalfE * sigmoid(weight(weights.w0, i) + input(given.w, token, i)));
      const Vec kk = key * weight(weights.k_k, i), k = key * fused(a - 1.0f, weight(weights.k_a, i), splat(1.0f));
      squares = fused(kk, kk, squares);
      k_r = fused(k, r, k_r);
      kk_a_r = fused(kk * a, r, kk_a_r);
      bonus = fused(k * r, weight(weights.r_k, i), bonus);
      narrow(t.decay + i, decay);
      narrow(t.decay_r + i, decay * r);
      narrow(t.k + i, k);
      narrow(t.kk_a + i, kk * a);
      narrow(t.minus_kk + i, kk);
      narrow(t.v + i, values(token, i, v_first));
    }
    const float scale = 1.0f / std::max(std::sqrt(sum(squares)), kLeastLength);
    for (int64_t i = 0; i < padded; i += kLanes) {
      narrow(t.kk_a + i, widen(t.kk_a + i) * scale);
      narrow(t.minus_kk + i, widen(t.minus_kk + i) * -scale);
    }
    t.k_r = sum(k_r);
    t.kk_a_r = sum(kk_a_r) * scale;
    t.bonus = sum(bonus);
  }

  // y is the decayed S . r: with what the token itself adds, normed over the head, with the bonus, gated.
  void finish(Token& t, int64_t token, T* out) const {
    const int64_t padded = shape.padded();
    for (int64_t i = 0; i < padded; i += kLanes)
      narrow(t.y + i, fused(widen(t.v + i), splat(t.k_r), fused(widen(t.removed + i), splat(t.kk_a_r), widen(t.y + i))));
    const Moments m = moments(t.y, shape.size(), kHeadEps);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec d = (widen(t.y + i) - m.mean) * m.scale;
      const Vec normed = fused(d, weight(weights.norm_weight, i), weight(weights.norm_bias, i));
      const Vec y = fused(widen(t.v + i), splat(t.bonus), normed) * input(given.g, token, i);
      store(out + token * width + channel + i, y, shape.lanes(i));
    }
  }
};

// What a sweep brings into the second-level cache on its way (the first is full): `bytes` of a later head's state for
// each key.
struct Ahead {
  const char* state;
  int64_t bytes;
};

// A key's number in all lanes.
inline Vec key(const float* numbers, int64_t j, bool wanted) { return wanted ? splat(numbers[j]) : Vec{}; }

// One pass over VECS vectors of values of every key. First, when UPDATE, what `last` did: S = S decay + removed kk_a +
// v k. Then, when READ, what `next` needs: removed = S . -kk and y = S . decay r. S goes from one matrix to another, or
// stays where it is.
template <int VECS, bool UPDATE, bool READ, class From, class To>
inline void sweep(int64_t keys, const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t lanes,
                  const Token& last, Token& next, int64_t value, Ahead ahead) {
  Vec v[VECS], gone[VECS], removed[VECS] = {}, y[VECS] = {};
  for (int i = 0; i < VECS && UPDATE; i++) {
    v[i] = widen(last.v + value + i * kLanes);
    gone[i] = widen(last.removed + value + i * kLanes);
  }
  Saturation<To> limit;
  for (int64_t j = 0; j < keys; j++) {
    for (int64_t line = 0; line < ahead.bytes; line += 64) __builtin_prefetch(ahead.state + j * ahead.bytes + line, 0, 2);
    const Vec k = key(last.k, j, UPDATE), kk_a = key(last.kk_a, j, UPDATE), decay = key(last.decay, j, UPDATE);
    const Vec minus_kk = key(next.minus_kk, j, READ), decay_r = key(next.decay_r, j, READ);
#pragma GCC unroll 4
    for (int i = 0; i < VECS; i++) {
      Vec s = load(from + j * from_stride + i * kLanes, lanes);
      if (UPDATE) s = fused(v[i], k, fused(gone[i], kk_a, s * decay));
      if (READ) {
        removed[i] = fused(s, minus_kk, removed[i]);
        y[i] = fused(s, decay_r, y[i]);
      }
      if (UPDATE || (const void*)from != to) limit.store(to + j * to_stride + i * kLanes, s, lanes);
    }
  }
  if (limit.passed())
    for (int64_t j = 0; j < keys; j++)
      for (int i = 0; i < VECS; i++) limit.hold(to + j * to_stride + i * kLanes, lanes);
  for (int i = 0; i < VECS && READ; i++) {
    narrow(next.removed + value + i * kLanes, removed[i]);
    narrow(next.y + value + i * kLanes, y[i]);
  }
}

template <bool UPDATE, bool READ, int SIZE, class From, class To>
void sweep_head(const Shape<SIZE>& shape, const From* from, int64_t from_stride, To* to, int64_t to_stride,
                const Token& last, Token& next, Ahead ahead = {nullptr, 0}) {
  constexpr int kVecs = SIZE && SIZE % (4 * kLanes) == 0 ? 4 : 1;
  for (int64_t i = 0; i < shape.size(); i += kVecs * kLanes)
    sweep<kVecs, UPDATE, READ>(shape.size(), from + i, from_stride, to + i, to_stride, shape.lanes(i), last, next, i,
                               i ? Ahead{nullptr, 0} : ahead);
}

// A float state that one token only works on need not be copied: it is used where it is.
float* in_place(float* state) { return state; }
float* in_place(Half*) { return nullptr; }

// One head of one row: its tokens from..to, its state in `state`, that of a later task in `later`.
template <class T, class S, int SIZE>
void run_head(const Head<T, SIZE>& head, int64_t from, int64_t to, T* v_first, S* state, const S* later, T* out,
              float* memory) {
  const Shape<SIZE> shape = head.shape;
  const int64_t size = shape.size(), padded = shape.padded();
  Token a(memory + size * padded, padded), b(a.decay + Token::kArrays * padded, padded);
  Token *now = &a, *last = &b;
  float* const own = to == from + 1 ? in_place(state) : nullptr;
  float* const buffer = own ? own : memory;
  const int64_t stride = own ? size : padded;
  for (int64_t t = from; t < to; t++) {
    head.prepare(*now, t, v_first);
    if (t == from) sweep_head<false, true>(shape, state, size, buffer, stride, *last, *now);
    else sweep_head<true, true>(shape, buffer, stride, buffer, stride, *last, *now);
    head.finish(*now, t, out);
    std::swap(now, last);
  }
  const Ahead ahead = {(const char*)later, later ? size * int64_t(sizeof(S)) : 0};
  sweep_head<true, false>(shape, buffer, stride, state, size, *last, *now, ahead);
}

// A 64-byte aligned buffer of this thread.
float* scratch(int64_t count) {
  static thread_local std::vector<float> memory;
  memory.resize(std::max<size_t>(memory.size(), count + kLanes));
  return (float*)((uintptr_t(memory.data()) + 63) / 64 * 64);
}

template <class T, class S, int SIZE>
void wkv7(const RecurrentHeads& weights, const RecurrentRows& rows, const RecurrentGiven& given, T* v_first, S* state,
          T* out) {
  const Shape<SIZE> shape{weights.size};
  const int64_t heads = weights.heads, size = shape.size(), tasks = rows.rows * heads;
  const auto state_of = [&](int64_t task) {
    return task < tasks ? state + (rows.slots[task / heads] * heads + task % heads) * size * size : nullptr;
  };
  const int64_t work = rows.tokens * heads * size * size;
  const int64_t threads = std::min({rows.threads, tasks, 1 + work / kSmallWork});
  const int64_t portion = std::clamp<int64_t>(tasks / (8 * threads), 1, 4);
#pragma omp parallel for num_threads(threads) schedule(dynamic, portion) if (threads > 1)
  for (int64_t task = 0; task < tasks; task++) {
    const int64_t row = task / heads;
    const Head<T, SIZE> head{shape, weights, given, task % heads * size, heads * size};
    float* const memory = scratch((size + 2 * Token::kArrays) * shape.padded());
    run_head(head, rows.offsets[row], rows.offsets[row + 1], v_first, state_of(task), state_of(task + 2), out, memory);
  }
}

template <class T, class S>
void wkv7(const RecurrentHeads& weights, const RecurrentRows& rows, const RecurrentGiven& given, T* v_first, S* state,
          T* out) {
  if (weights.size == 64) wkv7<T, S, 64>(weights, rows, given, v_first, state, out);
  else wkv7<T, S, 0>(weights, rows, given, v_first, state, out);
}

}  // namespace

extern "C" {

// x [tokens, width], shift [slots, width], mixes [count, width], out [count, tokens, width].
void recurrent_shift_mix(const RecurrentNorm* norm, const RecurrentRows* rows, const float* mixes, int64_t count,
                         float* x, const void* delta, float* shift, void* out, int32_t type) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    shift_mix(*norm, *rows, mixes, count, x, (const T*)delta, shift, (T*)out);
  });
}

// state [slots, heads, size, size] as float or Half.
void recurrent_wkv7(const RecurrentHeads* weights, const RecurrentRows* rows, const RecurrentGiven* given,
                    void* v_first, void* state, void* out, int32_t type, int32_t state_type) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (state_type == kHalf) wkv7(*weights, *rows, *given, (T*)v_first, (Half*)state, (T*)out);
    else wkv7(*weights, *rows, *given, (T*)v_first, (float*)state, (T*)out);
  });
}

// out [count, width] from the rows of x at `positions` (all when null); x of any type, times `scales` per row unless null.
void recurrent_norm_rows(const RecurrentNorm* norm, int64_t count, const void* x, int32_t x_type, const float* scales,
                         const int64_t* positions, const void* delta, int32_t delta_type, void* out, int32_t out_type,
                         int64_t threads) {
  const Source source{x, x_type, scales, positions};
  with_type(out_type, [&](auto t) {
    using T = decltype(t);
    in_parts(count, count * norm->width * 2, threads, [&](int64_t from, int64_t to) {
      norm_rows(*norm, source, delta, delta_type, from, to, (T*)out);
    });
  });
}

// The instructions these kernels were compiled for.
const char* recurrent_instructions() {
#if defined(__AVX512F__)
  return "AVX512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "portable";
#endif
}
}
