#include "dispatch.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace diffquant {
namespace {

// Best first.
std::vector<const Kernel*> runnable_kernels() {
  std::vector<const Kernel*> out;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) out.push_back(&kAvx512Kernel);
  if (avx2) out.push_back(&kAvx2Kernel);
#endif
  out.push_back(&kPlainKernel);
  return out;
}

std::atomic<const Kernel*>& chosen() {
  static std::atomic<const Kernel*> chosen{runnable_kernels().front()};
  return chosen;
}

}  // namespace

const Kernel& kernel() { return *chosen(); }

bool use_kernel(const char* name) {
  for (const Kernel* each : runnable_kernels()) {
    if (std::strcmp(each->name, name) != 0) continue;
    chosen() = each;
    return true;
  }
  return false;
}

}  // namespace diffquant
