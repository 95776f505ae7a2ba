// y = activation(x W^T) over int8 or int4 weights packed once into panels, in integer arithmetic.
//
// Rows are quantised on the way in, each by the largest of its own elements, to one plane of bytes (8 bits) or two
// (16 bits: 256 high + low), which leaves weight-only accuracy. A plane is a row to the inner loop, so 16 bits cost
// twice the products of 8. A row's result depends on nothing but the row and the number of planes.
//
// A panel is kPanel output columns for the whole depth: per group of the depth its columns' scales, then steps of four
// along the depth. The rows lie in blocks of up to kRows planes, in the order in which the loop takes them: per group
// a word per plane that corrects for the weights' zero point, then per step a word (four bytes) per plane.
// Work is panel-major, as in linear.cpp: a panel comes from memory once and serves all row blocks.

#include "quantised.h"

#include <algorithm>
#include <memory>
#include <utility>

// One product; the Python side fills it in (kernels/quantised.py, _pack_task, lists the same fields).
struct QuantisedTask {
  const void* weight;  // packed panels
  const void* x;       // [rows, depth], x_stride elements from row to row
  void* y;             // [rows, columns], y_stride elements from row to row
  int64_t rows, columns, depth, group, x_stride, y_stride;
  int32_t bits, planes, x_type, y_type, activation, unused;
};

namespace {

constexpr int kPanel = kLanes * kVectors;
constexpr int kRows = LINEAR_ROWS;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kPrefetchLimit = 256 << 10;  // bytes of a panel; two larger ones crowd an L2 cache
constexpr int kPrefetchPlanes = 8;             // planes of a block from which computing hides a prefetch
constexpr int64_t kStreamedResult = 8 << 20;   // bytes; a smaller result is read again from the caches
constexpr double kSmallWork = 256 * 1024;      // multiply-adds below which a second thread costs more than it brings
constexpr float kSmallest = 1e-30f;            // a row of nothing larger counts as zero

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The sizes that follow from a weight's shape. Without groups the one group is the whole depth.
struct Shape {
  int64_t groups, steps, group_bytes, panel_bytes, panels;
  Shape(int64_t columns, int64_t depth, int64_t group, int32_t bits) {
    steps = round_up(group, 4) / 4;
    groups = depth / group;
    group_bytes = kPanel * int64_t(sizeof(float)) + steps * (bits == 8 ? Int8::kStepBytes : Int4::kStepBytes);
    panel_bytes = groups * group_bytes;
    panels = round_up(columns, kPanel) / kPanel;
  }
};

// ---- rows

// Where a task's quantised rows lie, and how they are cut into blocks.
struct Rows {
  int64_t blocks, words;  // `words` per plane
  int32_t* data;
  float* scales;  // one per row
};

template <class Element>
float row_scale(const Element* x, int64_t depth, float levels) {
  Floats most = {}, zero = {};
  for (int64_t k = 0; k < depth; k += kLanes) {
    const Floats v = widen(x + k, std::min<int64_t>(kLanes, depth - k));
    const Floats size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    zero += v * 0.0f;  // NaN where something is not finite
  }
  const float found = largest(most);
  return (found < kSmallest ? 0.0f : found / levels) + sum_of(zero);
}

// Quantises a row to `planes` rows of bytes, `high` and `low` (one plane: `low` alone).
template <class Element>
void to_bytes(const Element* x, int64_t depth, float inverse, int32_t planes, int8_t* high, int8_t* low) {
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, depth - k);
    const Ints q = rounded(widen(x + k, count) * inverse);
    const Ints upper = planes == 2 ? (q + 128) >> 8 : Ints{};
    const Bytes lows = __builtin_convertvector(q - upper * 256, Bytes);
    store(low + k, lows, count);
    if (planes == 1) continue;
    const Bytes highs = __builtin_convertvector(upper, Bytes);
    store(high + k, highs, count);
  }
}

// Lays a plane out for the inner loop: every group's correction, then its words, `stride` words apart.
void lay_out(const int8_t* bytes, const Shape& shape, int32_t zero, int64_t stride, int32_t* to) {
  const Ints ones = splat_int(0x01010101);
  for (int64_t g = 0; g < shape.groups; g++, bytes += 4 * shape.steps) {
    Ints sums = {};
    int64_t s = 0;
    for (; s + kLanes <= shape.steps; s += kLanes) sums = dot(sums, ones, load<Ints>(bytes + 4 * s));
    Ints rest = {};
    std::memcpy(&rest, bytes + 4 * s, 4 * (shape.steps - s));
    *to = -zero * sum_of(dot(sums, ones, rest));
    to += stride;
    for (s = 0; s < shape.steps; s++, to += stride) *to = load<int32_t>(bytes + 4 * s);
  }
}

// Quantises row `row` into its place. `bytes` has room for two planes and is zero beyond the depth.
template <class Element>
void quantise_row(const QuantisedTask& task, const Rows& rows, int64_t row, int8_t* bytes) {
  const Shape shape(task.columns, task.depth, task.group, task.bits);
  const int32_t planes = task.planes, zero = task.bits == 8 ? Int8::kZero : Int4::kZero;
  const int64_t padded = 4 * shape.steps * shape.groups;
  const Element* x = (const Element*)task.x + row * task.x_stride;
  const float levels = planes == 2 ? 32639.0f : 127.0f, scale = row_scale(x, task.depth, levels);
  rows.scales[row] = scale;
  for (int64_t k = task.depth; k < padded; k++) bytes[k] = bytes[padded + k] = 0;
  to_bytes(x, task.depth, scale > 0 ? 1 / scale : 0.0f, planes, bytes, bytes + padded);

  int64_t block = row * rows.blocks / task.rows;  // or the one after, by rounding
  while ((block + 1) * task.rows / rows.blocks <= row) block++;
  const int64_t first = block * task.rows / rows.blocks, count = (block + 1) * task.rows / rows.blocks - first;
  int32_t* to = rows.data + first * planes * rows.words + (row - first) * planes;
  for (int32_t plane = 0; plane < planes; plane++)
    lay_out(planes == 2 ? bytes + plane * padded : bytes + padded, shape, zero, count * planes, to + plane);
}

// ---- tiles

// What a tile brings into the L2 cache while it computes: at every step `lines` cache lines, `ahead` bytes further on.
struct Prefetch {
  int64_t ahead;
  int lines;
};

// Sums of R planes by one panel, scaled by the weights' scales.
template <class W, int R>
void tile(const char* weight, const int32_t* x, const Shape& shape, Prefetch prefetch, Floats* sums) {
  Floats total[R][kVectors] = {};
  for (int64_t g = 0; g < (W::kGrouped ? shape.groups : 1); g++) {
    const char* scales = weight;
    weight += kPanel * sizeof(float);
    Ints sum[R][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) sum[i][0] = sum[i][1] = splat_int(x[i]);
    x += R;
    for (int64_t s = 0; s < shape.steps; s++, weight += W::kStepBytes, x += R) {
      for (int line = 0; line < prefetch.lines; line++)
        __builtin_prefetch(weight + prefetch.ahead + line * kCacheLine, 0, 2);
      Ints w[kVectors];
      W::weights(weight, w);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) {
        const Ints input = splat_int(x[i]);
        sum[i][0] = dot(sum[i][0], w[0], input);
        sum[i][1] = dot(sum[i][1], w[1], input);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
      for (int j = 0; j < kVectors; j++)
        total[i][j] += __builtin_convertvector(sum[i][j], Floats) * load<Floats>(scales + j * sizeof(Floats));
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
    for (int j = 0; j < kVectors; j++) sums[i * kVectors + j] = total[i][j];
}

using Tile = void (*)(const char*, const int32_t*, const Shape&, Prefetch, Floats*);

template <class W, size_t... Counts>
Tile tile_of(int64_t planes, std::index_sequence<Counts...>) {
  static constexpr Tile tiles[] = {tile<W, int(Counts) + 1>...};
  return tiles[planes - 1];
}

// A large float32 result (logits) goes past the caches, in whole lines: they need not be read first.
inline bool streams(const QuantisedTask& task) {
#if defined(__AVX512F__)
  return task.y_type == kFloat32 && task.rows * task.columns * 4 >= kStreamedResult &&
         uintptr_t(task.y) % kCacheLine == 0 && task.y_stride * 4 % kCacheLine == 0;
#else
  return false;
#endif
}

inline void store_floats(float* to, Floats v, int64_t count, bool streamed) {
#if defined(__AVX512F__)
  if (streamed && count >= kLanes) return _mm512_stream_ps(to, (__m512)v);
#endif
  store(to, v, count);
}

inline void stream_end() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// A row's sums from those of its planes.
template <int PLANES>
inline Floats whole(const Floats* sums) {
  return PLANES == 2 ? sums[0] * 256.0f + sums[kVectors] : sums[0];
}

// Scales, activates and stores the sums of `rows` rows.
template <int PLANES>
void finish(const QuantisedTask& task, const Floats* sums, const float* scales, int64_t row, int64_t column,
            int64_t rows) {
  const bool streamed = streams(task);
  for (int64_t i = 0; i < rows; i++)
    for (int j = 0; j < kVectors; j++) {
      const int64_t first = column + j * kLanes, count = task.columns - first, at = (row + i) * task.y_stride + first;
      if (count <= 0) break;
      const Floats value = activate(whole<PLANES>(sums + i * PLANES * kVectors + j) * scales[row + i], task.activation);
      if (task.y_type == kBfloat16) store((uint16_t*)task.y + at, to_bfloat16(value), count);
      else store_floats((float*)task.y + at, value, count, streamed);
    }
}

// The same for the most frequent tiles: whole lines of a bf16 result, with an activation that is quickly done.
template <int PLANES, bool SQUARED>
void finish_lines(const QuantisedTask& task, const Floats* sums, const float* scales, int64_t row, int64_t column,
                  int64_t rows) {
  uint16_t* y = (uint16_t*)task.y + row * task.y_stride + column;
  for (int64_t i = 0; i < rows; i++, y += task.y_stride, sums += PLANES * kVectors)
    for (int j = 0; j < kVectors; j++) {
      const Floats value = whole<PLANES>(sums + j) * scales[row + i];
      store(y + j * kLanes, to_bfloat16(SQUARED ? relu2(value) : value), kLanes);
    }
}

using Finish = void (*)(const QuantisedTask&, const Floats*, const float*, int64_t, int64_t, int64_t);

template <int PLANES>
Finish finish_of(const QuantisedTask& task, int64_t column) {
  if (task.y_type != kBfloat16 || task.columns - column < kPanel || task.activation > kRelu2) return finish<PLANES>;
  return task.activation == kRelu2 ? finish_lines<PLANES, true> : finish_lines<PLANES, false>;
}

// The work of one product, cut into units: unit u is row block u % blocks of panel u / blocks.
struct Plan {
  Shape shape;
  int64_t blocks, units;
  double unit_cost;
  explicit Plan(const QuantisedTask& task) : shape(task.columns, task.depth, task.group, task.bits) {
    const int64_t most = kRows / task.planes;
    blocks = (task.rows + most - 1) / most;
    units = shape.panels * blocks;
    unit_cost = units ? double(task.rows * task.planes) * double(task.columns) * double(task.depth) / double(units) : 0;
  }
  int64_t words() const { return shape.groups * (1 + shape.steps); }
};

void run_unit(const QuantisedTask& task, const Plan& plan, const Rows& rows, int64_t unit) {
  const int64_t panel = unit / plan.blocks, block = unit % plan.blocks;
  const int64_t row = task.rows * block / plan.blocks, count = task.rows * (block + 1) / plan.blocks - row;
  const int64_t planes = count * task.planes;
  const bool far = plan.shape.panel_bytes <= kPrefetchLimit && planes >= kPrefetchPlanes && block == 0;
  const int lines = int((task.bits == 8 ? Int8::kStepBytes : Int4::kStepBytes) / kCacheLine);
  const Prefetch prefetch = far ? Prefetch{plan.shape.panel_bytes, lines} : Prefetch{0, 0};
  const auto all = std::make_index_sequence<kRows>();
  const Tile run = task.bits == 8 ? tile_of<Int8>(planes, all) : tile_of<Int4>(planes, all);
  Floats sums[kRows * kVectors];
  run((const char*)task.weight + panel * plan.shape.panel_bytes, rows.data + row * task.planes * rows.words, plan.shape,
      prefetch, sums);
  const Finish done = task.planes == 2 ? finish_of<2>(task, panel * kPanel) : finish_of<1>(task, panel * kPanel);
  done(task, sums, rows.scales, row, panel * kPanel, count);
}

// One thread's part: the units whose first multiply-add lies in [from, to) of all the tasks' work laid end to end.
void run_part(const QuantisedTask* tasks, const Rows* rows, int64_t count, double from, double to) {
  double base = 0;
  for (int64_t t = 0; t < count; t++) {
    const Plan plan(tasks[t]);
    for (int64_t unit = 0; unit < plan.units; unit++) {
      const double start = base + double(unit) * plan.unit_cost;
      if (start >= to) return stream_end();
      if (start >= from) run_unit(tasks[t], plan, rows[t], unit);
    }
    base += double(plan.units) * plan.unit_cost;
  }
  stream_end();
}

// Quantises the rows number `part` modulo `parts` of a task.
void quantise_part(const QuantisedTask& task, const Rows& rows, int64_t part, int64_t parts) {
  thread_local std::unique_ptr<int8_t[]> bytes;
  thread_local int64_t room = 0;
  const int64_t needed = 2 * round_up(task.depth, 4);
  if (room < needed) bytes.reset(new int8_t[room = needed]);
  for (int64_t row = part; row < task.rows; row += parts)
    if (task.x_type == kBfloat16) quantise_row<uint16_t>(task, rows, row, bytes.get());
    else quantise_row<float>(task, rows, row, bytes.get());
}

// Memory of the calling thread for the quantised rows of all its tasks; it grows to the largest call so far.
char* scratch(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t room = 0;
  if (room < bytes + kCacheLine) memory.reset(new char[room = bytes + bytes / 4 + kCacheLine]);
  return (char*)round_up(int64_t(memory.get()), kCacheLine);
}

// Places for the quantised rows of every task; returns the bytes they need (and, with `at`, fills in `rows`).
int64_t place(const QuantisedTask* tasks, int64_t count, char* at, Rows* rows) {
  int64_t bytes = 0;
  for (int64_t t = 0; t < count; t++) {
    const Plan plan(tasks[t]);
    const int64_t data = round_up(4 * plan.words() * tasks[t].rows * tasks[t].planes, kCacheLine);
    if (at) rows[t] = {plan.blocks, plan.words(), (int32_t*)(at + bytes), (float*)(at + bytes + data)};
    bytes += data + round_up(4 * tasks[t].rows, kCacheLine);
  }
  return bytes;
}

// Signed bytes or halves of bytes [columns, depth] as the unsigned numbers that the kernel wants.
int32_t stored(const void* weight, int32_t bits, int64_t index) {
  if (bits == 8) return ((const int8_t*)weight)[index] + Int8::kZero;
  return (((const uint8_t*)weight)[index / 2] >> (index % 2 * 4)) & 15;
}

void pack_panel(const void* weight, const float* scales, int64_t columns, int64_t depth, const Shape& shape,
                int32_t bits, int64_t first, char* to) {
  const int64_t group = depth / shape.groups;
  for (int64_t g = 0; g < shape.groups; g++) {
    for (int64_t c = 0; c < kPanel; c++)
      ((float*)to)[c] = first + c < columns ? scales[(first + c) * shape.groups + g] : 0.0f;
    to += kPanel * sizeof(float);
    for (int64_t s = 0; s < shape.steps; s++, to += bits == 8 ? Int8::kStepBytes : Int4::kStepBytes)
      for (int64_t c = 0; c < kPanel; c++)
        for (int64_t b = 0; b < 4; b++) {
          const int64_t k = 4 * s + b, column = first + c;
          const int32_t value = column < columns && k < group ? stored(weight, bits, column * depth + g * group + k) : 0;
          if (bits == 8) to[4 * c + b] = char(value);
          else if (c < kLanes) to[4 * c + b] = char(value);
          else to[4 * (c - kLanes) + b] |= char(value << 4);
        }
  }
}

}  // namespace

extern "C" {

// Bytes of a packed [columns, depth] weight; `group` is the depth itself for int8.
int64_t quantised_packed_bytes(int64_t columns, int64_t depth, int64_t group, int32_t bits) {
  const Shape shape(columns, depth, group, bits);
  return shape.panels * shape.panel_bytes;
}

// Packs a contiguous weight, [columns, depth] int8 or [columns, depth / 2] bytes of two int4 (+ 8, the even one in the
// low half), with its scales [columns, depth / group]; `packed` is aligned to 64 bytes.
void quantised_pack(const void* weight, const float* scales, int64_t columns, int64_t depth, int64_t group, int32_t bits,
                    void* packed, int32_t threads) {
  const Shape shape(columns, depth, group, bits);
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < shape.panels; panel++)
    pack_panel(weight, scales, columns, depth, shape, bits, panel * kPanel, (char*)packed + panel * shape.panel_bytes);
}

// Runs the products in one parallel region.
void quantised_run(const QuantisedTask* tasks, int64_t count, int32_t threads) {
  double total = 0;
  for (int64_t t = 0; t < count; t++) total += double(Plan(tasks[t]).units) * Plan(tasks[t]).unit_cost;
  const int64_t table = round_up(count * int64_t(sizeof(Rows)), kCacheLine);
  char* memory = scratch(table + place(tasks, count, nullptr, nullptr));
  Rows* rows = (Rows*)memory;
  place(tasks, count, memory + table, rows);
  if (threads <= 1 || total < kSmallWork) {
    for (int64_t t = 0; t < count; t++) quantise_part(tasks[t], rows[t], 0, 1);
    return run_part(tasks, rows, count, 0, total + 1);
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static, 1)
    for (int32_t part = 0; part < threads; part++)
      for (int64_t t = 0; t < count; t++) quantise_part(tasks[t], rows[t], part, threads);
#pragma omp for schedule(static, 1)
    for (int32_t part = 0; part < threads; part++)
      run_part(tasks, rows, count, total * part / threads,
               part + 1 == threads ? total + 1 : total * (part + 1) / threads);
  }
}

// The instructions the kernel was compiled for.
const char* quantised_instructions() {
#if defined(__AVX512VNNI__)
  return "AVX512-VNNI";
#elif defined(__AVXVNNI__)
  return "AVX-VNNI";
#elif defined(__AVX512BW__)
  return "AVX512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "portable";
#endif
}
}
