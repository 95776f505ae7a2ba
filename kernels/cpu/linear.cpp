// y = activation(x W^T): one kernel for every number of rows, over weights packed once into panels.
//
// A panel is kPanel output columns for the whole depth, [K][kPanel] in fp32 and [K/2][kPanel][2] in bf16 (the pairs
// that vdpbf16ps multiplies), zero padded; the last panel is narrowed to a multiple of kLanes. A tile is up to kRows
// rows by one panel, held in registers while the depth is walked in one order. Every row goes through the same
// operations whatever rows stand beside it, so its result has the same bits in any batch and with any thread count.
// The loop is panel-major: a panel comes from memory once and stays in the L2 cache while all row blocks use it.
// A panel is narrow and a tile tall, so that a decode batch of up to kRows rows is one tile: weights stream once,
// past all of it.

#include "linear.h"

#include <algorithm>
#include <utility>

// One product; the Python side fills it in (kernels/linear.py, _pack_task, lists the same fields).
struct LinearTask {
  const void* weight;  // packed panels
  const void* x;       // [rows, depth], x_stride elements from row to row
  void* y;             // [rows, columns], y_stride elements from row to row
  int64_t rows, columns, depth, x_stride, y_stride;
  int32_t weight_type, y_type, activation, unused;
};

namespace {

constexpr int kVectors = 2;
constexpr int kPanel = kLanes * kVectors;
constexpr int kRows = LINEAR_ROWS;
constexpr int kRowsOfOneSet = 8;  // rows a multiple of kSetStride bytes apart share one set of the L1 cache: 8 lines
constexpr int64_t kSetStride = 4096;
constexpr int64_t kCacheLine = 64;
constexpr int64_t kPrefetchLimit = 512 << 10;  // bytes; two panels of more do not fit an L2 cache beside the rows
constexpr int64_t kStreamedResult = 8 << 20;   // bytes; a smaller result is read again from the caches
constexpr int64_t kBusyRows = 7;               // from here on computing, not memory, is the limit
constexpr double kSmallWork = 128 * 1024;      // multiply-adds below which a second thread costs more than it brings

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t element_size(int32_t type) { return type == kBfloat16 ? 2 : 4; }
inline int64_t padded_depth(int64_t depth, int32_t type) { return type == kBfloat16 ? round_up(depth, 2) : depth; }
inline int64_t panel_bytes(int64_t depth, int32_t type) {
  return kPanel * padded_depth(depth, type) * element_size(type);
}

// What a tile brings into the L2 cache while it computes: at every step `lines` cache lines, `ahead` bytes further on.
struct Prefetch {
  int64_t ahead;
  int lines;
};

// A large float32 result (logits) goes past the caches, in whole lines: they need not be read first.
#if defined(__AVX512F__)
inline bool streams(const LinearTask& task) {
  return task.y_type == kFloat32 && task.rows * task.columns * 4 >= kStreamedResult &&
         uintptr_t(task.y) % kCacheLine == 0 && task.y_stride * 4 % kCacheLine == 0;
}
inline void stream(float* to, Floats v) { _mm512_stream_ps(to, (__m512)v); }
inline void stream_end() { _mm_sfence(); }
#else
inline bool streams(const LinearTask&) { return false; }
inline void stream(float* to, Floats v) { store(to, v, kLanes); }
inline void stream_end() {}
#endif

// Activates and stores any tile's sums. Not inlined: the tile's registers are for its loop.
__attribute__((noinline)) void finish(const LinearTask& task, const Floats* sums, int64_t row, int64_t column, int rows,
                                      int vectors) {
  const bool streamed = streams(task);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vectors; j++) {
      const int64_t first = column + j * kLanes, count = task.columns - first, at = (row + i) * task.y_stride + first;
      const Floats value = activate(sums[i * vectors + j], task.activation);
      if (task.y_type == kBfloat16) store((uint16_t*)task.y + at, to_bfloat16(value), count);
      else if (streamed && count >= kLanes) stream((float*)task.y + at, value);
      else store((float*)task.y + at, value, count);
    }
}

// Where a tile's rows are whole lines of the result, they are stored from the registers.
inline bool is_whole(const LinearTask& task, int64_t column, int vectors) {
  return vectors == kVectors && task.columns - column >= kPanel && task.activation <= kRelu2;
}

template <int R, int N, class Element, class Store>
inline void finish_whole(const LinearTask& task, const Floats (&sum)[R][N], int64_t row, int64_t column, Store put) {
  const bool squared = task.activation == kRelu2;
  Element* y = (Element*)task.y + row * task.y_stride + column;
#pragma GCC unroll 16
  for (int i = 0; i < R; i++, y += task.y_stride)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) put(y + j * kLanes, squared ? relu2(sum[i][j]) : sum[i][j]);
}

template <int R, int N>
inline void finish_whole(const LinearTask& task, const Floats (&sum)[R][N], int64_t row, int64_t column) {
  const auto narrow = [](uint16_t* y, Floats v) { store(y, to_bfloat16(v), kLanes); };
  const auto plain = [](float* y, Floats v) { store(y, v, kLanes); };
  const auto past_caches = [](float* y, Floats v) { stream(y, v); };
  if (task.y_type == kBfloat16) finish_whole<R, N, uint16_t>(task, sum, row, column, narrow);
  else if (streams(task)) finish_whole<R, N, float>(task, sum, row, column, past_caches);
  else finish_whole<R, N, float>(task, sum, row, column, plain);
}

template <class T, int R, int N>
void tile(const LinearTask& task, const char* weight, int64_t row, int64_t column, Prefetch prefetch) {
  using Element = typename T::Element;
  using Weight = typename T::Weight;
  const int64_t stride = task.x_stride, steps = task.depth / T::kStep;
  const Element* x[(R + 2) / 3];  // every third row; the two between are reached by indexed addressing
  for (int i = 0; i < R; i += 3) x[i / 3] = (const Element*)task.x + (row + i) * stride;
  Floats sum[R][N] = {};

  for (int64_t k = 0; k < steps; k++, weight += N * sizeof(Weight)) {
    for (int line = 0; line < prefetch.lines; line++)
      __builtin_prefetch(weight + prefetch.ahead + line * kCacheLine, 0, 2);
    Weight weights[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) weights[j] = *(const Weight*)(weight + j * sizeof(Weight));
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const auto input = T::input(x[i / 3] + (i % 3) * stride);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) sum[i][j] = T::step(sum[i][j], weights[j], input);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; i += 3) x[i / 3] += T::kStep;
  }
  if (task.depth % T::kStep) {
    const Element* last = (const Element*)task.x + row * stride + steps * T::kStep;
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 16
      for (int j = 0; j < N; j++)
        sum[i][j] = T::step(sum[i][j], *(const Weight*)(weight + j * sizeof(Weight)), T::last(last + i * stride));
  }
  if (is_whole(task, column, N)) return finish_whole(task, sum, row, column);
  Floats finished[R * N];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) finished[i * N + j] = sum[i][j];
  finish(task, finished, row, column, R, N);
}

using Tile = void (*)(const LinearTask&, const char*, int64_t, int64_t, Prefetch);

template <class T, int N, size_t... Rows>
Tile tile_of(int64_t rows, std::index_sequence<Rows...>) {
  static constexpr Tile tiles[] = {tile<T, int(Rows) + 1, N>...};
  return tiles[rows - 1];
}

template <class T>
Tile tile_of(int64_t rows, bool whole_panel) {
  const auto all = std::make_index_sequence<kRows>();
  return whole_panel ? tile_of<T, kVectors>(rows, all) : tile_of<T, 1>(rows, all);
}

// The work of one product, cut into units: unit u is row block u % blocks of panel u / blocks. The rows are dealt
// out evenly: 14 rows are 7 + 7, not 12 + 2.
struct Plan {
  int64_t panels, blocks, units, bytes;
  double unit_cost;
  explicit Plan(const LinearTask& task) {
    const bool one_set = task.x_stride * element_size(task.weight_type) % kSetStride == 0;
    panels = round_up(task.columns, kPanel) / kPanel;
    blocks = round_up(task.rows, one_set ? kRowsOfOneSet : kRows) / (one_set ? kRowsOfOneSet : kRows);
    units = panels * blocks;
    bytes = panel_bytes(task.depth, task.weight_type);
    unit_cost = units ? double(task.rows) * double(task.columns) * double(task.depth) / double(units) : 0;
  }

  // Rows enough to be busy hide the next panel's way from memory; with few, the processor's own prefetch does better.
  Prefetch prefetch(int64_t rows, int64_t block) const {
    if (bytes > kPrefetchLimit || (blocks == 1 && rows < kBusyRows)) return {0, 0};
    const int64_t lines = kPanel * 4 / kCacheLine, share = std::max<int64_t>(lines / blocks, 1);  // by the first blocks
    return block < lines ? Prefetch{bytes + block * share * kCacheLine, int(share)} : Prefetch{0, 0};
  }
};

void run_unit(const LinearTask& task, const Plan& plan, int64_t unit) {
  const int64_t panel = unit / plan.blocks, block = unit % plan.blocks;
  const int64_t row = task.rows * block / plan.blocks;
  const int64_t rows = task.rows * (block + 1) / plan.blocks - row;
  const int64_t column = panel * kPanel;
  const bool whole = task.columns - column > kLanes;
  const Tile run = task.weight_type == kBfloat16 ? tile_of<Bfloat16>(rows, whole) : tile_of<Float32>(rows, whole);
  run(task, (const char*)task.weight + panel * plan.bytes, row, column, plan.prefetch(rows, block));
}

// One thread's part: the units whose first multiply-add lies in [from, to) of all the tasks' work laid end to end.
void run_part(const LinearTask* tasks, int64_t count, double from, double to) {
  double base = 0;
  for (int64_t t = 0; t < count; t++) {
    const Plan plan(tasks[t]);
    for (int64_t unit = 0; unit < plan.units; unit++) {
      const double start = base + double(unit) * plan.unit_cost;
      if (start >= to) return stream_end();
      if (start >= from) run_unit(tasks[t], plan, unit);
    }
    base += double(plan.units) * plan.unit_cost;
  }
  stream_end();
}

template <class Element, int kStep>
void pack_panel(const Element* weight, int64_t columns, int64_t depth, int64_t first, Element* packed) {
  const int64_t here = std::min<int64_t>(kPanel, columns - first), width = round_up(here, kLanes);
  for (int64_t k = 0; k < depth; k += kStep)
    for (int64_t c = 0; c < width; c++)
      for (int64_t s = 0; s < kStep; s++)
        *packed++ = c < here && k + s < depth ? weight[(first + c) * depth + k + s] : Element(0);
}

}  // namespace

extern "C" {

// Bytes of a packed [columns, depth] weight.
int64_t linear_packed_bytes(int64_t columns, int64_t depth, int32_t type) {
  return round_up(columns, kLanes) * padded_depth(depth, type) * element_size(type);
}

// Packs a contiguous [columns, depth] weight; `packed` is aligned to 64 bytes.
void linear_pack(const void* weight, int64_t columns, int64_t depth, int32_t type, void* packed, int32_t threads) {
  const int64_t bytes = panel_bytes(depth, type);
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < round_up(columns, kPanel) / kPanel; panel++) {
    void* to = (char*)packed + panel * bytes;
    const int64_t first = panel * kPanel;
    if (type == kBfloat16) pack_panel<uint16_t, 2>((const uint16_t*)weight, columns, depth, first, (uint16_t*)to);
    else pack_panel<float, 1>((const float*)weight, columns, depth, first, (float*)to);
  }
}

// Runs the products in one parallel region.
void linear_run(const LinearTask* tasks, int64_t count, int32_t threads) {
  double total = 0;
  for (int64_t t = 0; t < count; t++) total += double(Plan(tasks[t]).units) * Plan(tasks[t]).unit_cost;
  if (threads <= 1 || total < kSmallWork) return run_part(tasks, count, 0, total + 1);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int32_t part = 0; part < threads; part++)
    run_part(tasks, count, total * part / threads, part + 1 == threads ? total + 1 : total * (part + 1) / threads);
}

// The instructions the bf16 kernel was compiled for.
const char* linear_instructions() {
#if defined(__AVX512BF16__)
  return "AVX512-BF16";
#elif defined(__AVX512F__)
  return "AVX512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "portable";
#endif
}
}
