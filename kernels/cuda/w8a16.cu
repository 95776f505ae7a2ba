// y = x W^T with fp16 rows and int8 weights that have a scale per output column: a CUTLASS mixed-input GEMM.
//
// The weights are widened in registers on their way into the tensor cores (mma.sync, compute capability 8.0 and up),
// sums are fp32, and the scales are multiplied in as the sums are stored. No sum is split between thread blocks, so a
// row's bits do not depend on the other rows of its tile.

#include <cstdint>

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>  // after the others: it names things it does not include

namespace {

using cutlass::half_t;
namespace visit = cutlass::epilogue::threadblock;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
constexpr int kAlignX = 8, kAlignW = 16, kAlignY = 8;  // elements in 128 bits; half a line of y
constexpr int kStages = 3;

template <class Block, class Warp>
struct Product {
  using Threads = visit::OutputTileThreadLayout<Block, Warp, half_t, kAlignY, 1>;
  using Scales = visit::VisitorRowBroadcast<Threads, float, cute::Stride<cute::_0, cute::_1, int32_t>>;
  using Multiply = visit::VisitorCompute<cutlass::multiplies, half_t, float, kRound>;
  using Scaled = visit::Sm80EVT<Multiply, visit::VisitorAccFetch, Scales>;
  using Store = visit::VisitorAuxStore<Threads, half_t, kRound, cute::Stride<int64_t, cute::_1, int64_t>>;
  using Epilogue = visit::Sm80EVT<Store, Scaled>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      half_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignX,     //
      int8_t, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kAlignW,  //
      half_t, cutlass::layout::RowMajor, kAlignY,                                       //
      float, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Block, Warp,
      cutlass::gemm::GemmShape<16, 8, 16>, Epilogue, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>,
      kStages, cutlass::arch::OpMultiplyAddMixedInputUpcast, 1>::GemmKernel;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static int run(const half_t* x, const int8_t* w, const float* scales, half_t* y, int rows, int columns, int depth,
                 cudaStream_t stream) {
    const typename Epilogue::Arguments epilogue{
        {{}, {scales, 0.0f, {cute::_0{}, cute::_1{}, columns}}, {}},
        {y, {columns, cute::_1{}, int64_t(rows) * columns}},
    };
    const typename Gemm::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, {rows, columns, depth}, 1,
                                             epilogue, x, w, nullptr, nullptr, 0, 0, 0, 0, depth, depth, 0, 0);
    Gemm gemm;
    cutlass::Status status = gemm.initialize(arguments, nullptr, stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
    return int(status);
  }
};

using Few = Product<cutlass::gemm::GemmShape<16, 128, 64>, cutlass::gemm::GemmShape<16, 32, 64>>;
using Many = Product<cutlass::gemm::GemmShape<128, 128, 64>, cutlass::gemm::GemmShape<64, 64, 64>>;

}  // namespace

extern "C" {

// x [rows, depth] and y [rows, columns] fp16, w [columns, depth] int8, scales [columns] fp32, all contiguous and aligned
// to 16 bytes; depth a multiple of 16, columns of 8. `many` picks the tiles for many rows. Returns CUTLASS's status, 0
// for success.
int w8a16_run(const void* x, const void* w, const void* scales, void* y, int32_t rows, int32_t columns, int32_t depth,
              int32_t many, void* stream) {
  const auto run = many ? Many::run : Few::run;
  return run((const half_t*)x, (const int8_t*)w, (const float*)scales, (half_t*)y, rows, columns, depth,
             (cudaStream_t)stream);
}

// What a status means.
const char* w8a16_message(int32_t status) { return cutlass::cutlassGetStatusString(cutlass::Status(status)); }
}
