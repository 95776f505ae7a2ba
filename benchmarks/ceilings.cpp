// What the processor and its memory can do at most, for benchmarks/ceilings.py.
#include <cstddef>
#include <cstdint>
#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Reads `bytes` (a multiple of 256 per thread) and returns their sum, so that no read can be left out.
static uint64_t read_part(const uint64_t* data, size_t count) {
#if defined(__AVX512F__)
  __m512i sum[4] = {};
  for (size_t i = 0; i + 32 <= count; i += 32) {
    _mm_prefetch(reinterpret_cast<const char*>(data + i) + 4096, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + i) + 4096 + 64, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + i) + 4096 + 128, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + i) + 4096 + 192, _MM_HINT_T0);
    for (int k = 0; k < 4; ++k)
      sum[k] = _mm512_add_epi64(sum[k], _mm512_loadu_si512(data + i + 8 * k));
  }
  __m512i all = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
#else
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += data[i];
  return sum;
#endif
}

extern "C" uint64_t rl_read_all(const uint64_t* data, size_t bytes, int threads) {
  uint64_t sum = 0;
  const size_t share = bytes / 8 / threads / 32 * 32;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  sum += read_part(data + omp_get_thread_num() * share, share);
  return sum;
}

// bf16 multiply-adds on registers only: the instruction's own limit. Returns the operations done, 0 where there is
// no such instruction.
extern "C" double rl_bf16_operations(size_t rounds, int threads, float* sink) {
#if defined(__AVX512BF16__)
  constexpr int CHAINS = 20;  // hides the latency
#pragma omp parallel num_threads(threads)
  {
    __m512 acc[CHAINS];
    for (auto& value : acc) value = _mm512_setzero_ps();
    __m512bh x = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80)), y = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3c00));
    for (size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 20
      for (int k = 0; k < CHAINS; ++k) acc[k] = _mm512_dpbf16_ps(acc[k], x, y);
      asm volatile("" : "+v"(x), "+v"(y));
    }
    float sum = 0;
    for (auto& value : acc) sum += _mm512_reduce_add_ps(value);
    sink[omp_get_thread_num()] = sum;
  }
  return static_cast<double>(rounds) * CHAINS * 64 * threads;
#else
  return 0;
#endif
}
