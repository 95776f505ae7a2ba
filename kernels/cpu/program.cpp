// Kernel calls in a row, made by one call from Python: see program.py, which numbers the kernels alike.

#include <cstdint>

extern "C" {

struct LinearTask;
struct QuantisedTask;
struct RecurrentNorm;
struct RecurrentRows;
struct RecurrentHeads;
struct RecurrentGiven;

void linear_run(const LinearTask* tasks, int64_t count, int32_t threads);
void quantised_run(const QuantisedTask* tasks, int64_t count, int32_t threads);
void recurrent_shift_mix(const RecurrentNorm* norm, const RecurrentRows* rows, const float* mixes, int64_t count,
                         float* x, const void* delta, float* shift, void* out, int32_t type);
void recurrent_wkv7(const RecurrentHeads* weights, const RecurrentRows* rows, const RecurrentGiven* given,
                    void* v_first, void* state, void* out, int32_t type, int32_t state_type);
void recurrent_norm_rows(const RecurrentNorm* norm, int64_t count, const void* x, int32_t x_type, const float* scales,
                         const int64_t* positions, const void* delta, int32_t delta_type, void* out, int32_t out_type,
                         int64_t threads);

struct ProgramCall {
  int64_t kernel;
  int64_t arguments[11];  // numbers as they are, pointers as addresses
};

void program_run(const ProgramCall* calls, int64_t count) {
  for (const ProgramCall* call = calls; call < calls + count; call++) {
    const int64_t* const a = call->arguments;
    const auto at = [a](int i) { return (void*)a[i]; };
    switch (call->kernel) {
      case 0: linear_run((const LinearTask*)at(0), a[1], a[2]); break;
      case 1: quantised_run((const QuantisedTask*)at(0), a[1], a[2]); break;
      case 2:
        recurrent_shift_mix((const RecurrentNorm*)at(0), (const RecurrentRows*)at(1), (const float*)at(2), a[3],
                            (float*)at(4), at(5), (float*)at(6), at(7), a[8]);
        break;
      case 3:
        recurrent_wkv7((const RecurrentHeads*)at(0), (const RecurrentRows*)at(1), (const RecurrentGiven*)at(2), at(3),
                       at(4), at(5), a[6], a[7]);
        break;
      case 4:
        recurrent_norm_rows((const RecurrentNorm*)at(0), a[1], at(2), a[3], (const float*)at(4), (const int64_t*)at(5),
                            at(6), a[7], at(8), a[9], a[10]);
        break;
    }
  }
}
}
