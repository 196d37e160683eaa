// One product by a kernel whose intrinsics are modelled, as the library's own diffquant_matmul gives one.
#include "matmul_run.h"

#include <cstring>

extern "C" int modelled_matmul(const char* name, int64_t rows, int64_t channels, int64_t width, int64_t block,
                               int64_t bits, const float* x, const uint8_t* codes, const float* scales, float* y) {
  using namespace diffquant;
  for (const MatmulKernel* kernel : {&kPlainMatmul, &kVnniMatmul, &kAmxMatmul, &kNeonMatmul}) {
    if (std::strcmp(kernel->name, name) != 0) continue;
    multiply_here(*kernel, rows, {channels, width, block, bits, nullptr, nullptr}, x, codes, scales, y);
    return 1;
  }
  return 0;
}
