// The part of ONNX Runtime's C ABI that a custom op needs, declared here because no package carries its headers.
// OrtApi is an append-only table of function pointers: an index never changes once released. Each index below is the
// position of that name in the table, in ONNX Runtime's onnxruntime_c_api.h and its C# mirror.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

// Releases from 1.17 on serve this version; the newest slot used, KernelContext_ParallelFor, came with it.
constexpr uint32_t kApiVersion = 17;

using Api = const void* const*;
using Status = void;  // opaque; null means success
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct SessionOptions;
struct CustomOpDomain;

struct ApiBase {
  Api (*get_api)(uint32_t version);
  const char* (*version)();
};

template <class Function>
struct Slot {
  int index;
  Function operator()(Api api) const { return reinterpret_cast<Function>(const_cast<void*>(api[index])); }
};

constexpr int kFail = 1;
constexpr int kInvalidArgument = 2;

constexpr Slot<Status* (*)(int code, const char* message)> kCreateStatus{0};
constexpr Slot<Status* (*)(const char* domain, CustomOpDomain**)> kCreateCustomOpDomain{26};
constexpr Slot<Status* (*)(CustomOpDomain*, const void* op)> kCustomOpDomainAdd{27};
constexpr Slot<Status* (*)(SessionOptions*, CustomOpDomain*)> kAddCustomOpDomain{28};
constexpr Slot<Status* (*)(const Value*, void** data)> kGetTensorData{51};
constexpr Slot<Status* (*)(const TensorInfo*, size_t*)> kGetDimensionsCount{61};
constexpr Slot<Status* (*)(const TensorInfo*, int64_t* dims, size_t count)> kGetDimensions{62};
constexpr Slot<Status* (*)(const Value*, TensorInfo**)> kGetTensorTypeAndShape{65};
constexpr Slot<Status* (*)(const KernelInfo*, const char* name, float*)> kGetAttributeFloat{85};
constexpr Slot<Status* (*)(const KernelInfo*, const char* name, int64_t*)> kGetAttributeInt{86};
constexpr Slot<Status* (*)(const KernelInfo*, const char* name, char*, size_t* size)> kGetAttributeString{87};
constexpr Slot<Status* (*)(const KernelContext*, size_t index, const Value**)> kGetInput{90};
constexpr Slot<Status* (*)(KernelContext*, size_t index, const int64_t* dims, size_t count, Value**)> kGetOutput{91};
constexpr Slot<void (*)(Status*)> kReleaseStatus{93};
constexpr Slot<void (*)(TensorInfo*)> kReleaseTensorInfo{99};
constexpr Slot<Status* (*)(const KernelInfo*, size_t index, int* is_constant, const Value**)> kGetConstantInput{249};
constexpr Slot<Status* (*)(const KernelContext*, void (*task)(void*, size_t), size_t count, size_t batches, void*)>
    kParallelFor{274};

// What ONNX Runtime calls. Fields that came after kApiVersion are not read and not declared.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, Api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*execution_provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy_kernel)(void* kernel);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  int (*variadic_input_min_arity)(const CustomOp*);
  int (*variadic_input_homogeneity)(const CustomOp*);
  int (*variadic_output_min_arity)(const CustomOp*);
  int (*variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, Api, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
  Status* (*infer_output_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
};

}  // namespace ort
