// Which kernel multiplies codes on this processor.
#include <atomic>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "matmul_run.h"

namespace diffquant {
namespace {

struct Candidate {
  const MatmulKernel* kernel;
  bool runs;
  // Whether it was measured faster than ONNX Runtime's own product on such a processor.
  bool is_faster;
};

#if defined(__x86_64__) && !defined(DIFFQUANT_WITHOUT_AMX)
// Whether the processor has tiles of int8 and the system lets this process use them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr unsigned kTiles = 1 << 24, kBytes = 1 << 25;  // AMX-TILE and AMX-INT8
  unsigned a, b, c, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) == 0 || (d & kBytes) == 0) return false;
  // Tiles make a thread's state larger than memory that programs set aside for signals, so each has to ask for them.
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<Candidate> candidates() {
  std::vector<Candidate> out;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const bool vnni = avx2 && avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#if !defined(DIFFQUANT_WITHOUT_AMX)
  static const bool tiles = vnni && may_use_tiles();
  out.push_back({&kAmxMatmul, tiles, true});
#endif
  out.push_back({&kVnniMatmul, vnni, true});
  // Beside AVX-512 without VNNI, where the runtime's own kernel is wider than this one, nothing was measured.
  out.push_back({&kAvx2Matmul, avx2, !avx512});
#elif defined(__aarch64__)
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1 << 20;  // HWCAP_ASIMDDP
  const bool dot = getauxval(AT_HWCAP) & kDotProducts;
#else
  const bool dot = true;
#endif
  out.push_back({&kNeonMatmul, dot, false});
#endif
  out.push_back({&kPlainMatmul, true, false});
  return out;
}

// Whether a kernel gives what the plain one gives, to the last bit: an instruction that an emulator or a processor has
// wrong must not go unnoticed.
bool agrees_with_plain(const MatmulKernel& kernel) {
  constexpr int64_t kRows = 45, kChannels = 40, kWidth = 90, kBlock = 32;
  uint32_t state = 1;
  const auto next = [&] { return state = state * 1664525 + 1013904223, state >> 8; };
  for (const int64_t bits : {4, 8}) {
    const PackedMatrix shape{kChannels, kWidth, kBlock, bits, nullptr, nullptr};
    std::vector<float> x(kRows * kWidth), scales(kChannels * shape.blocks());
    std::vector<uint8_t> codes(kChannels * shape.padded() * bits / 8);
    for (float& value : x) value = static_cast<float>(next()) / (1 << 23) - 1;
    for (float& value : scales) value = static_cast<float>(next()) / (1 << 24);
    for (uint8_t& value : codes) value = static_cast<uint8_t>(next());
    std::vector<float> wanted(kRows * kChannels), given(kRows * kChannels);
    multiply_here(kPlainMatmul, kRows, shape, x.data(), codes.data(), scales.data(), wanted.data());
    multiply_here(kernel, kRows, shape, x.data(), codes.data(), scales.data(), given.data());
    if (std::memcmp(wanted.data(), given.data(), given.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

const MatmulKernel* choose() {
  for (const Candidate& each : candidates()) {
    if (each.runs && each.is_faster && agrees_with_plain(*each.kernel)) return each.kernel;
  }
  return nullptr;
}

std::atomic<const MatmulKernel*>& chosen() {
  static std::atomic<const MatmulKernel*> chosen{choose()};
  return chosen;
}

}  // namespace

const MatmulKernel* matmul_kernel() { return chosen(); }

bool use_matmul_kernel(const char* name) {
  const MatmulKernel* kernel = find_matmul_kernel(name);
  if (kernel) chosen() = kernel;
  return kernel != nullptr;
}

const MatmulKernel* find_matmul_kernel(const char* name) {
  for (const Candidate& each : candidates()) {
    if (each.runs && std::strcmp(each.kernel->name, name) == 0) return each.kernel;
  }
  return nullptr;
}

}  // namespace diffquant
