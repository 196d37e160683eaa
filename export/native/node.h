// One node of a graph: its attributes, and a call of it with its inputs checked.
#pragma once

#include <stdexcept>
#include <string>

#include "ort_api.h"
#include "problem.h"

namespace diffquant {

// ONNX's numbers of element types.
enum class Element : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kHalf = 10 };

// Something a user can cause; its text becomes ONNX Runtime's error.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What ONNX Runtime answered to a request; goes back to it as it is.
struct RefusedByRuntime {
  ort::Status* status;
};

class Node {
 public:
  Node(ort::Api, const ort::KernelInfo*, Element activations, Element cache);
  void compute(ort::KernelContext*) const;

 private:
  friend class Call;

  ort::Api api_;
  int64_t pairs_, kv_pairs_, signals_, generation_, window_, rotary_, interleaved_;
  float scale_;
  LogitScheme logits_;
  Storage activations_, cache_;
};

}  // namespace diffquant
