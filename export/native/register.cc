// What ONNX Runtime finds in the library: its ops, each once for each pair of activation and cache types.
#include <atomic>
#include <mutex>

#include "dispatch.h"
#include "matmul_op.h"
#include "matmul_run.h"
#include "node.h"
#include "runtime.h"

#define DIFFQUANT_EXPORT extern "C" __attribute__((visibility("default")))

namespace diffquant {
namespace {

constexpr size_t kOutputs = 3;
constexpr int kRequired = 0, kOptional = 1;
constexpr int kDefaultMemory = 0;
// Version 1 is version 2 with a noise head for each pair and without gates.
constexpr int kOldestVersion = 1, kNewestVersion = 2;

std::atomic<int64_t> calls{0};

struct Op : ort::CustomOp {
  int64_t maps;
  Element activations, cache;

  const char* title() const { return maps == 2 ? "DifferentialAttention" : "QuantizedAttention"; }
  Element input_element(size_t i) const {
    switch (input_at(i, maps)) {
      case kLambda: case kKeyScale: case kValueScale: case kSignalGate: return Element::kFloat;
      case kPastKey: case kPastValue: return cache;
      case kSeqlens: case kTotal: return Element::kInt32;
      default: return activations;
    }
  }
};

// A kernel of ONNX Runtime, which hands only itself to its calls.
struct Instance {
  ort::Api api;
  const Op& op;
  Node node;
};

const Op& as_op(const ort::CustomOp* op) { return *static_cast<const Op*>(op); }

ort::Status* create_kernel(const ort::CustomOp* op, ort::Api api, const ort::KernelInfo* info, void** kernel) {
  const Op& made = as_op(op);
  return guarded(api, made.title(), [&] {
    *kernel = new Instance{api, made, Node(api, info, made.maps, made.activations, made.cache)};
  });
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  ++calls;
  const Instance& instance = *static_cast<Instance*>(kernel);
  return guarded(instance.api, instance.op.title(), [&] { instance.node.compute(context); });
}

Op make_op(int64_t maps, Element activations, Element cache) {
  Op op{};
  op.maps = maps;
  op.activations = activations;
  op.cache = cache;
  op.version = ort::kApiVersion;
  op.name = [](const ort::CustomOp* op) { return as_op(op).title(); };
  op.execution_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_count = [](const ort::CustomOp* op) { return input_count(as_op(op).maps); };
  op.output_count = [](const ort::CustomOp*) { return kOutputs; };
  op.input_type = [](const ort::CustomOp* op, size_t i) { return static_cast<int>(as_op(op).input_element(i)); };
  op.output_type = [](const ort::CustomOp* op, size_t i) {
    return static_cast<int>(i == 0 ? as_op(op).activations : as_op(op).cache);
  };
  op.input_characteristic = [](const ort::CustomOp* op, size_t i) {
    const int64_t maps = as_op(op).maps;
    const Input input = input_at(i, maps);
    // A cache of codes alone: what it is read from tells their type.
    if (input == kPastKey || input == kPastValue) return maps == 2 ? kOptional : kRequired;
    return input >= kCos ? kOptional : kRequired;
  };
  op.output_characteristic = [](const ort::CustomOp*, size_t) { return kRequired; };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return kDefaultMemory; };
  op.variadic_input_min_arity = op.variadic_output_min_arity = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_homogeneity = op.variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
  op.start_version = [](const ort::CustomOp*) { return kOldestVersion; };
  op.end_version = [](const ort::CustomOp*) { return kNewestVersion; };
  op.create_kernel_v2 = create_kernel;
  op.compute_v2 = compute;
  op.destroy_kernel = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  return op;
}

const Op kOps[] = {
    make_op(2, Element::kFloat, Element::kFloat), make_op(2, Element::kFloat, Element::kInt8),
    make_op(2, Element::kFloat, Element::kUint8), make_op(2, Element::kHalf, Element::kHalf),
    make_op(2, Element::kHalf, Element::kInt8),   make_op(2, Element::kHalf, Element::kUint8),
    make_op(1, Element::kFloat, Element::kInt8),  make_op(1, Element::kFloat, Element::kUint8),
    make_op(1, Element::kHalf, Element::kInt8),   make_op(1, Element::kHalf, Element::kUint8),
};

ort::Status* make_domain(ort::Api api, ort::CustomOpDomain** domain) {
  if (ort::Status* status = ort::kCreateCustomOpDomain(api)("diffquant", domain)) return status;
  for (const Op& op : kOps) {
    if (ort::Status* status = ort::kCustomOpDomainAdd(api)(*domain, &op)) return status;
  }
  // Where the runtime's own product is as fast, a node's function body leads to it.
  return matmul_kernel() ? ort::kCustomOpDomainAdd(api)(*domain, &matmul_op()) : nullptr;
}

}  // namespace
}  // namespace diffquant

// Called by ONNX Runtime when the library is registered with a session's options.
DIFFQUANT_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  const ort::Api api = base->get_api(ort::kApiVersion);
  if (!api) {
    // Too old for this library. An error needs an API too: version 1 is always served.
    return ort::kCreateStatus(base->get_api(1))(ort::kFail, "diffquant's library needs ONNX Runtime 1.17 or newer");
  }
  // One domain serves every session of the process, and outlives them all.
  static std::mutex mutex;
  static ort::CustomOpDomain* domain = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!domain) {
    ort::CustomOpDomain* made = nullptr;
    if (ort::Status* status = diffquant::make_domain(api, &made)) return status;
    domain = made;
  }
  return ort::kAddCustomOpDomain(api)(options, domain);
}

// The instruction set in use: plain, avx2 or avx512.
DIFFQUANT_EXPORT const char* diffquant_kernel_name() { return diffquant::kernel().name; }

// Uses another instruction set from now on, for tests; returns 0 where this processor lacks it.
DIFFQUANT_EXPORT int diffquant_use_kernel(const char* name) { return diffquant::use_kernel(name); }

// How often the kernel has run in this process: tells a test, or doctor, that the body did not run instead.
DIFFQUANT_EXPORT int64_t diffquant_kernel_calls() { return diffquant::calls; }

// The instruction set of products with codes; null where ONNX Runtime's own are used.
DIFFQUANT_EXPORT const char* diffquant_matmul_kernel_name() {
  const diffquant::MatmulKernel* kernel = diffquant::matmul_kernel();
  return kernel ? kernel->name : nullptr;
}

// Has sessions of this process use another instruction set for products with codes, to test or measure it; returns 0
// where this processor lacks it. Registering fixes whether there is one at all: this comes before the first session.
DIFFQUANT_EXPORT int diffquant_use_matmul_kernel(const char* name) { return diffquant::use_matmul_kernel(name); }

// How often a product with codes has run in this process.
DIFFQUANT_EXPORT int64_t diffquant_matmul_calls() { return diffquant::matmul_calls(); }

// One product by the kernel of that name, for tests: y [rows, channels] of x [rows, width], MatMulNBits' codes and its
// scales. Returns 0 where this processor lacks the kernel.
DIFFQUANT_EXPORT int diffquant_matmul(const char* name, int64_t rows, int64_t channels, int64_t width, int64_t block,
                                      int64_t bits, const float* x, const uint8_t* codes, const float* scales,
                                      float* y) {
  const diffquant::MatmulKernel* kernel = diffquant::find_matmul_kernel(name);
  if (kernel) diffquant::multiply_here(*kernel, rows, {channels, width, block, bits, nullptr, nullptr}, x, codes, scales, y);
  return kernel != nullptr;
}
