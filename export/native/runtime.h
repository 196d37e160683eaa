// What a kernel asks of ONNX Runtime, and what it throws: nothing may be thrown into the runtime itself.
#pragma once

#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_api.h"

namespace diffquant {

// Something a user can cause; its text becomes ONNX Runtime's error.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What ONNX Runtime answered to a request; goes back to it as it is.
struct RefusedByRuntime {
  ort::Status* status;
};

using Shape = std::vector<int64_t>;

inline std::string text(const Shape& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

inline void require(bool condition, const std::string& otherwise) {
  if (!condition) throw InvalidArgument(otherwise);
}

inline void check(ort::Status* status) {
  if (status) throw RefusedByRuntime{status};
}

template <class T>
T attribute(ort::Api api, const ort::KernelInfo* info, const char* name,
            ort::Slot<ort::Status* (*)(const ort::KernelInfo*, const char*, T*)> slot) {
  T value{};
  ort::Status* status = slot(api)(info, name, &value);
  if (status) ort::kReleaseStatus(api)(status);
  require(!status, std::string("attribute ") + name + " is missing; every node carries all of them");
  return value;
}

inline int64_t integer(ort::Api api, const ort::KernelInfo* info, const char* name) {
  return attribute<int64_t>(api, info, name, ort::kGetAttributeInt);
}

// A number of heads, and a size along one axis. Products of these with each other and with the sizes of inputs fit int64.
constexpr int64_t kMostHeads = 1 << 20, kMostSize = INT64_C(0x7fffffff);

// Every attribute is bounded before anything is computed of it.
inline int64_t integer(ort::Api api, const ort::KernelInfo* info, const char* name, int64_t least, int64_t most) {
  const int64_t value = integer(api, info, name);
  require(least <= value && value <= most, std::string("attribute ") + name + " is " + std::to_string(value) +
                                               ", not " + std::to_string(least) + " to " + std::to_string(most));
  return value;
}

inline bool flag(ort::Api api, const ort::KernelInfo* info, const char* name) {
  return integer(api, info, name, 0, 1) != 0;
}

inline const void* data_of(ort::Api api, const ort::Value* value) {
  void* out = nullptr;
  check(ort::kGetTensorData(api)(value, &out));
  return out;
}

inline Shape shape_of(ort::Api api, const ort::Value* value) {
  ort::TensorInfo* info = nullptr;
  check(ort::kGetTensorTypeAndShape(api)(value, &info));
  size_t count = 0;
  check(ort::kGetDimensionsCount(api)(info, &count));
  Shape out(count);
  check(ort::kGetDimensions(api)(info, out.data(), count));
  ort::kReleaseTensorInfo(api)(info);
  // An empty tensor may have any sizes beside its 0, and they are multiplied here as those of others are.
  constexpr int64_t kMostEntries = INT64_C(1) << 56;
  int64_t entries = 1;
  for (const int64_t size : out) {
    const int64_t counted = size > 0 ? size : 1;
    require(entries <= kMostEntries / counted, "an input of " + text(out) + " is too large");
    entries *= counted;
  }
  return out;
}

inline void* make_output(ort::Api api, ort::KernelContext* context, size_t index, const Shape& shape) {
  ort::Value* out = nullptr;
  check(ort::kGetOutput(api)(context, index, shape.data(), shape.size(), &out));
  return const_cast<void*>(data_of(api, out));
}

// Calls task(0) to task(count - 1) on the session's threads.
template <class Task>
void run_in_parallel(ort::Api api, ort::KernelContext* context, int64_t count, const Task& task) {
  struct Shared {
    const Task& task;
    std::atomic<bool> failed{false};
  } shared{task};
  const auto one = [](void* data, size_t i) {
    Shared& shared = *static_cast<Shared*>(data);
    try {
      shared.task(static_cast<int64_t>(i));
    } catch (...) {
      shared.failed = true;  // nothing may be thrown into ONNX Runtime
    }
  };
  if (count == 1) one(&shared, 0);
  if (count > 1) check(ort::kParallelFor(api)(context, one, count, 0, &shared));
  if (shared.failed) throw std::bad_alloc();
}

inline ort::Status* failure(ort::Api api, const char* op, int code, const char* what) {
  const std::string message = std::string("diffquant::") + op + ": " + what;
  return ort::kCreateStatus(api)(code, message.c_str());
}

// Runs `body`; what it throws becomes a status, since nothing may be thrown into ONNX Runtime.
template <class Body>
ort::Status* guarded(ort::Api api, const char* op, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const RefusedByRuntime& refused) {
    return refused.status;
  } catch (const InvalidArgument& error) {
    return failure(api, op, ort::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return failure(api, op, ort::kFail, "out of memory");
  } catch (const std::exception& error) {
    return failure(api, op, ort::kFail, error.what());
  }
}

}  // namespace diffquant
