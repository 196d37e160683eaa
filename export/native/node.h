// One node of a graph: its attributes, and a call of it with its inputs checked.
#pragma once

#include "ort_api.h"
#include "problem.h"

namespace diffquant {

// ONNX's numbers of element types.
enum class Element : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kHalf = 10 };

// Inputs of DifferentialAttention by place. QuantizedAttention, with its one map, has neither λ nor gates, and the
// others in the same order.
enum Input {
  kQuery, kKey, kValue, kLambda, kPastKey, kPastValue, kSeqlens, kTotal, kCos, kSin, kKeyScale, kValueScale,
  kSignalGate, kOutputGate
};
inline Input input_at(size_t place, int64_t maps) {
  return static_cast<Input>(maps == 2 || place < kLambda ? place : place + 1);
}
inline size_t place_of(Input input, int64_t maps) { return maps == 2 || input < kLambda ? input : input - 1; }
inline size_t input_count(int64_t maps) { return place_of(maps == 2 ? kOutputGate : kValueScale, maps) + 1; }

class Node {
 public:
  // `maps` is 2 for DifferentialAttention and 1 for QuantizedAttention.
  Node(ort::Api, const ort::KernelInfo*, int64_t maps, Element activations, Element cache);
  void compute(ort::KernelContext*) const;

 private:
  friend class Call;
  void read_pairs(const ort::KernelInfo*);
  void read_heads(const ort::KernelInfo*);

  ort::Api api_;
  int64_t maps_, pairs_, kv_pairs_, signals_, window_;
  bool rotary_, interleaved_;
  int64_t generation_ = 2;
  float scale_;
  LogitScheme logits_{0, Granularity::kRow, false};
  Storage activations_, cache_;
};

}  // namespace diffquant
