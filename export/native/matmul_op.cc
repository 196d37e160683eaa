#include "matmul_op.h"

#include <optional>

#include "matmul_run.h"
#include "runtime.h"

namespace diffquant {
namespace {

constexpr const char* kName = "MatMulNBits";
enum Input : size_t { kActivations, kCodes, kScales, kInputs };

std::atomic<int64_t> calls{0};

class MatmulNode {
 public:
  MatmulNode(ort::Api api, const ort::KernelInfo* info) : api_(api), kernel_(*matmul_kernel()) {
    shape_ = {integer(api, info, "N", 1, kMostSize), integer(api, info, "K", 1, kMostSize),
              integer(api, info, "block_size", 16, 256), integer(api, info, "bits", 4, 8), nullptr, nullptr};
    const int64_t level = integer(api, info, "accuracy_level");
    require(shape_.bits == 4 || shape_.bits == 8, "attribute bits is " + std::to_string(shape_.bits) + ", not 4 or 8");
    require((shape_.block & (shape_.block - 1)) == 0,
            "attribute block_size is " + std::to_string(shape_.block) + ", not 16, 32, 64, 128 or 256");
    require(level == 4, "attribute accuracy_level is " + std::to_string(level) + "; this op rounds activations, level 4");
    const ort::Value *codes = constant(info, kCodes), *scales = constant(info, kScales);
    if (codes && scales) matrix_.emplace(pack(codes, scales));
  }

  void compute(ort::KernelContext* context) const {
    const ort::Value* x = input(context, kActivations);
    Shape shape = shape_of(api_, x);
    require(!shape.empty() && shape.back() == shape_.width,
            "A is " + text(shape) + ", its last axis is not K, " + std::to_string(shape_.width));
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    shape.back() = shape_.channels;
    float* y = static_cast<float*>(make_output(api_, context, 0, shape));
    if (!rows) return;
    // Codes that another node computes are packed at each call.
    std::optional<OwnedMatrix> packed;
    if (!matrix_) packed.emplace(pack(input(context, kCodes), input(context, kScales)));
    const OwnedMatrix& matrix = matrix_ ? *matrix_ : *packed;
    multiply_rows(kernel_, matrix.get(), static_cast<const float*>(data_of(api_, x)), rows, y,
                  [&](int64_t count, const auto& task) { run_in_parallel(api_, context, count, task); });
  }

 private:
  // An input that no call changes, or null.
  const ort::Value* constant(const ort::KernelInfo* info, Input index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    check(ort::kGetConstantInput(api_)(info, index, &is_constant, &value));
    return is_constant ? value : nullptr;
  }

  const ort::Value* input(ort::KernelContext* context, Input index) const {
    const ort::Value* out = nullptr;
    check(ort::kGetInput(api_)(context, index, &out));
    return out;
  }

  OwnedMatrix pack(const ort::Value* codes, const ort::Value* scales) const {
    const Shape wanted{shape_.channels, shape_.blocks(), shape_.block * shape_.bits / 8};
    const Shape codes_shape = shape_of(api_, codes), scales_shape = shape_of(api_, scales);
    require(codes_shape == wanted, "B is " + text(codes_shape) + ", expected " + text(wanted));
    int64_t count = 1;
    for (const int64_t size : scales_shape) count *= size;
    require(count == wanted[0] * wanted[1],
            "scales is " + text(scales_shape) + ", expected " + text({wanted[0], wanted[1]}));
    return OwnedMatrix(kernel_, shape_, static_cast<const uint8_t*>(data_of(api_, codes)),
                       static_cast<const float*>(data_of(api_, scales)));
  }

  ort::Api api_;
  const MatmulKernel& kernel_;
  PackedMatrix shape_;
  // Packed once, and only read from then on: calls may overlap.
  std::optional<OwnedMatrix> matrix_;
};

struct Instance {
  ort::Api api;
  MatmulNode node;
};

ort::CustomOp make_op() {
  ort::CustomOp op{};
  op.version = ort::kApiVersion;
  op.name = [](const ort::CustomOp*) { return kName; };
  op.execution_provider = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.input_count = [](const ort::CustomOp*) { return size_t{kInputs}; };
  op.output_count = [](const ort::CustomOp*) { return size_t{1}; };
  op.input_type = [](const ort::CustomOp*, size_t i) { return static_cast<int>(i == kCodes ? 2 : 1); };
  op.output_type = [](const ort::CustomOp*, size_t) { return 1; };
  op.input_characteristic = op.output_characteristic = [](const ort::CustomOp*, size_t) { return 0; };
  op.input_memory_type = [](const ort::CustomOp*, size_t) { return 0; };
  op.variadic_input_min_arity = op.variadic_output_min_arity = [](const ort::CustomOp*) { return 1; };
  op.variadic_input_homogeneity = op.variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
  op.start_version = [](const ort::CustomOp*) { return 1; };
  op.end_version = [](const ort::CustomOp*) { return 2; };
  op.create_kernel_v2 = [](const ort::CustomOp*, ort::Api api, const ort::KernelInfo* info, void** kernel) {
    return guarded(api, kName, [&] { *kernel = new Instance{api, MatmulNode(api, info)}; });
  };
  op.compute_v2 = [](void* kernel, ort::KernelContext* context) {
    ++calls;
    const Instance& instance = *static_cast<Instance*>(kernel);
    return guarded(instance.api, kName, [&] { instance.node.compute(context); });
  };
  op.destroy_kernel = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  return op;
}

}  // namespace

const ort::CustomOp& matmul_op() {
  static const ort::CustomOp op = make_op();
  return op;
}

int64_t matmul_calls() { return calls; }

}  // namespace diffquant
