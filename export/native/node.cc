#include "node.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch.h"
#include "runtime.h"

namespace diffquant {
namespace {

constexpr const char* kInputNames[] = {"query",     "key",        "value",     "lambda",
                                       "past_key",  "past_value", "seqlens_k", "total_sequence_length",
                                       "cos_cache", "sin_cache",  "k_scale",   "v_scale",
                                       "signal_gate", "output_gate"};

void require_shape(Input input, const Shape& shape, const Shape& wanted) {
  require(shape == wanted, std::string(kInputNames[input]) + " is " + text(shape) + ", expected " + text(wanted));
}

// Version 1 of the op has no signals_per_noise: each pair has a noise head of its own.
int64_t signals_per_noise(ort::Api api, const ort::KernelInfo* info) {
  int64_t value = 1;
  ort::Status* status = ort::kGetAttributeInt(api)(info, "signals_per_noise", &value);
  if (status) ort::kReleaseStatus(api)(status);
  return status ? 1 : integer(api, info, "signals_per_noise", 1, kMostHeads);
}

Granularity granularity(ort::Api api, const ort::KernelInfo* info) {
  char name[16] = {};
  size_t size = sizeof name;
  ort::Status* status = ort::kGetAttributeString(api)(info, "logit_granularity", name, &size);
  if (status) ort::kReleaseStatus(api)(status);
  const std::string given = status ? "" : name;
  if (given == "row") return Granularity::kRow;
  if (given == "head") return Granularity::kHead;
  if (given == "pair") return Granularity::kPair;
  if (given == "tensor") return Granularity::kTensor;
  throw InvalidArgument("attribute logit_granularity must be row, head, pair or tensor");
}

Storage cache_storage(int64_t bits, Element element, Storage activations) {
  const std::string given = "attribute kv_bit_width " + std::to_string(bits);
  switch (bits) {
    case 0:
      require(element == Element::kFloat || element == Element::kHalf, given + " is for a cache of the input's type");
      return activations;
    case 8: require(element == Element::kInt8, given + " needs an int8 cache"); return Storage::kInt8;
    case 6: require(element == Element::kUint8, given + " needs a uint8 cache"); return Storage::kPacked6;
    case 4: require(element == Element::kUint8, given + " needs a uint8 cache"); return Storage::kPacked4;
  }
  throw InvalidArgument(given + " is not 0, 4, 6 or 8");
}

}  // namespace

Node::Node(ort::Api api, const ort::KernelInfo* info, int64_t maps, Element activations, Element cache)
    : api_(api), maps_(maps) {
  maps == 2 ? read_pairs(info) : read_heads(info);
  scale_ = attribute<float>(api, info, "scale", ort::kGetAttributeFloat);
  // ONNX Runtime's GroupQueryAttention, to which function bodies lead, takes 0 for its own default.
  require(std::isfinite(scale_) && scale_ != 0,
          "attribute scale is " + std::to_string(scale_) + ", not a finite number other than 0");
  rotary_ = flag(api, info, "do_rotary");
  interleaved_ = flag(api, info, "rotary_interleaved");
  window_ = integer(api, info, "local_window_size", -1, kMostSize);
  activations_ = activations == Element::kHalf ? Storage::kHalf : Storage::kFloat;
  cache_ = cache_storage(integer(api, info, "kv_bit_width", 0, 8), cache, activations_);
  require(generation_ == 2 || !rotary_ || interleaved_, "generation 1 rotates interleaved channels only");
  require(window_ != 0, "attribute local_window_size must be -1 or at least 1");
}

void Node::read_pairs(const ort::KernelInfo* info) {
  pairs_ = integer(api_, info, "num_pairs", 1, kMostHeads);
  kv_pairs_ = integer(api_, info, "num_kv_pairs", 1, kMostHeads);
  signals_ = signals_per_noise(api_, info);
  generation_ = integer(api_, info, "generation", 1, 2);
  logits_ = {integer(api_, info, "logit_bits", 0, 8), granularity(api_, info), flag(api_, info, "logit_shift")};
  const std::string counts = std::to_string(kv_pairs_) + " does not divide num_pairs " + std::to_string(pairs_);
  require(pairs_ % kv_pairs_ == 0, "attribute num_kv_pairs " + counts);
  require(pairs_ % (signals_ * kv_pairs_) == 0,
          "attribute signals_per_noise " + std::to_string(signals_) + " times num_kv_pairs " +
              std::to_string(kv_pairs_) + " does not divide num_pairs " + std::to_string(pairs_));
  require(logits_.bits != 1, "attribute logit_bits is 1, not 0 or 2 to 8");
}

void Node::read_heads(const ort::KernelInfo* info) {
  pairs_ = signals_ = integer(api_, info, "num_heads", 1, kMostHeads);
  kv_pairs_ = integer(api_, info, "kv_num_heads", 1, kMostHeads);
  require(pairs_ % kv_pairs_ == 0,
          "attribute kv_num_heads " + std::to_string(kv_pairs_) + " does not divide num_heads " +
              std::to_string(pairs_));
}

// Inputs and outputs of one call, and its computation.
class Call {
 public:
  Call(const Node& node, ort::KernelContext* context) : node_(node), api_(node.api_), context_(context) {
    read_sizes();
    read_lengths();
    make_caches();
    read_rotation();
    if (problem_.maps == 2) read_lambda_and_gates();
    problem_.output = output(0, {problem_.batch, problem_.tokens, problem_.pairs * problem_.values.width});
  }

  void compute() {
    clear_padding();
    const Kernel& best = kernel();
    copy_past();
    append(best);
    const std::vector<Block> blocks = make_blocks(best.block_rows(problem_));
    std::vector<float> largest;
    if (problem_.logits.bits && problem_.logits.granularity != Granularity::kRow) largest = measure(best, blocks);
    const float* shared = largest.empty() ? nullptr : largest.data();
    parallel(blocks.size(), [&](int64_t i) { best.attend(problem_, blocks[i], shared); });
  }

 private:
  void read_sizes() {
    problem_.maps = node_.maps_;
    problem_.pairs = node_.pairs_;
    problem_.kv_pairs = node_.kv_pairs_;
    problem_.signals = node_.signals_;
    const Shape query = shape(kQuery), key = shape(kKey), value = shape(kValue);
    const bool differential = problem_.maps == 2;
    require(query.size() == 3,
            "query is " + text(query) + ", expected " + (differential ? "[B, T, (h+n)·d]" : "[B, T, h·d]"));
    const int64_t batch = query[0], tokens = query[1], kv_pairs = node_.kv_pairs_;
    const int64_t heads = problem_.query_heads();
    const int64_t width = query[2] / heads;
    const std::string counted = differential ? "its heads, num_pairs " + std::to_string(node_.pairs_) +
                                                   " and a noise head for every " + std::to_string(node_.signals_) +
                                                   ", " + std::to_string(heads)
                                             : "num_heads " + std::to_string(heads);
    require(width > 0 && query[2] == heads * width,
            "query is " + text(query) + ": its last axis is no multiple of " + counted);
    const int64_t row = node_.generation_ == 1 ? 2 * width : width;
    require_shape(kKey, key, {batch, tokens, kv_pairs * row});
    require_shape(kValue, value, {batch, tokens, kv_pairs * row});
    require(row * storage_bits(node_.cache_) % 8 == 0,
            "kv_bit_width " + std::to_string(storage_bits(node_.cache_)) + " does not fill bytes in rows of " +
                std::to_string(row));
    problem_.batch = batch;
    problem_.tokens = tokens;
    problem_.width = width;
    problem_.shared_keys = node_.generation_ == 2;
    problem_.activations = node_.activations_;
    problem_.query = data(kQuery);
    problem_.key = data(kKey);
    problem_.value = data(kValue);
    problem_.signal_gate = nullptr;
    problem_.output_gate = nullptr;
    problem_.scale = node_.scale_;
    problem_.window = node_.window_ < 0 ? std::numeric_limits<int64_t>::max() / 2 : node_.window_;
    problem_.logits = node_.logits_;
    problem_.keys.width = problem_.values.width = row;
  }

  void read_lengths() {
    require_shape(kSeqlens, shape(kSeqlens), {problem_.batch});
    const Shape total_shape = shape(kTotal);
    require(total_shape.empty() || total_shape == Shape{1},
            "total_sequence_length is " + text(total_shape) + ", expected a scalar");
    total_ = *static_cast<const int32_t*>(data(kTotal));
    require(total_ >= problem_.tokens, "total_sequence_length " + std::to_string(total_) + " is less than the " +
                                           std::to_string(problem_.tokens) + " new tokens of query");
    const int32_t* given = static_cast<const int32_t*>(data(kSeqlens));
    const bool first_call = total_ == problem_.tokens;
    for (int64_t i = 0; i < problem_.batch; ++i) {
      const int64_t length = int64_t{given[i]} + 1;
      const int64_t start = first_call ? 0 : length - problem_.tokens;
      require(start >= 0 && length >= 0 && length <= total_,
              "seqlens_k[" + std::to_string(i) + "] is " + std::to_string(given[i]) + " with " +
                  std::to_string(problem_.tokens) + " new tokens and total_sequence_length " + std::to_string(total_));
      start_.push_back(start);
      length_.push_back(length);
    }
    problem_.start = start_.data();
    problem_.length = length_.data();
  }

  void read_rotation() {
    problem_.interleaved = node_.interleaved_;
    problem_.cos = problem_.sin = nullptr;
    if (!node_.rotary_) return;
    const int64_t half = problem_.keys.width / 2;
    require(problem_.width % 2 == 0, "do_rotary needs an even width, query's is " + std::to_string(problem_.width));
    for (const Input input : {kCos, kSin}) {
      require(present(input), std::string(kInputNames[input]) + " is absent and do_rotary is 1");
      const Shape given = shape(input);
      require(given.size() == 2 && given[0] >= total_ && given[1] == half,
              std::string(kInputNames[input]) + " is " + text(given) + ", expected at least " +
                  text({total_, half}));
    }
    problem_.cos = data(kCos);
    problem_.sin = data(kSin);
  }

  void read_lambda_and_gates() {
    const Shape per_pair = {problem_.batch, problem_.tokens, problem_.pairs};
    const Shape lambda = shape(kLambda);
    problem_.lambda_per_pair = lambda.size() == 3;
    require_shape(kLambda, lambda, problem_.lambda_per_pair ? per_pair : Shape{1});
    problem_.lambda = static_cast<const float*>(data(kLambda));
    if (present(kSignalGate)) {
      const Shape given = shape(kSignalGate);
      problem_.signal_gate_per_pair = given.size() == 3;
      require_shape(kSignalGate, given, problem_.signal_gate_per_pair ? per_pair : Shape{1});
      problem_.signal_gate = static_cast<const float*>(data(kSignalGate));
    }
    if (present(kOutputGate)) {
      const Shape wanted = {problem_.batch, problem_.tokens, problem_.pairs * problem_.values.width};
      require_shape(kOutputGate, shape(kOutputGate), wanted);
      problem_.output_gate = data(kOutputGate);
    }
  }

  void make_caches() {
    const bool past = present(kPastKey);
    require(past == present(kPastValue), "past_key and past_value must both be given or both be absent");
    past_rows_ = 0;
    if (past) {
      const Shape given = shape(kPastKey);
      require(given.size() == 4, "past_key is " + text(given) + ", expected [B, h_kv, P, width]");
      past_rows_ = given[2];
    }
    const int64_t longest_start = start_.empty() ? 0 : *std::max_element(start_.begin(), start_.end());
    require(longest_start <= past_rows_, "past_key holds " + std::to_string(past_rows_) + " rows, seqlens_k and " +
                                             std::to_string(problem_.tokens) + " new tokens imply " +
                                             std::to_string(longest_start));
    make_cache(problem_.keys, kPastKey, kKeyScale, 1);
    make_cache(problem_.values, kPastValue, kValueScale, 2);
  }

  void make_cache(Cache& cache, Input past, Input scale, size_t index) {
    cache.storage = node_.cache_;
    cache.kv_pairs = problem_.kv_pairs;
    cache.rows = std::max(past_rows_, total_);
    const int64_t stored = storage_bits(cache.storage) < 8 ? cache.row_bytes() : cache.width;
    if (present(past)) require_shape(past, shape(past), {problem_.batch, problem_.kv_pairs, past_rows_, stored});
    const bool quantized = storage_bits(cache.storage) <= 8;
    require(present(scale) == quantized,
            kInputNames[scale] + std::string(quantized ? " is absent and the cache is quantized"
                                                       : " is given and kv_bit_width is 0"));
    cache.scale = nullptr;
    if (quantized) {
      require_shape(scale, shape(scale), {1, problem_.kv_pairs, 1, cache.width});
      cache.scale = static_cast<const float*>(data(scale));
    }
    cache.data = static_cast<uint8_t*>(output(index, {problem_.batch, problem_.kv_pairs, cache.rows, stored}));
  }

  // Rows before the new ones, unless past and present are one buffer.
  void copy_past() {
    if (!past_rows_) return;
    parallel(problem_.batch * problem_.kv_pairs, [this](int64_t i) {
      for (const auto& [cache, past] : {std::pair(&problem_.keys, kPastKey), std::pair(&problem_.values, kPastValue)}) {
        const int64_t bytes = past_rows_ * cache->row_bytes();
        const uint8_t* from = static_cast<const uint8_t*>(data(past));
        if (from == cache->data) continue;
        std::copy_n(from + i * bytes, bytes, cache->row(0, 0, i * cache->rows));
      }
    });
  }

  void append(const Kernel& best) {
    constexpr int64_t kTokens = 32;
    const int64_t chunks = (problem_.tokens + kTokens - 1) / kTokens;
    parallel(problem_.batch * chunks, [&](int64_t i) {
      const int64_t sequence = i / chunks, first = i % chunks * kTokens;
      best.append(problem_, sequence, first, std::min(kTokens, problem_.new_tokens(sequence) - first));
    });
  }

  // Rows of the output that belong to no token.
  void clear_padding() {
    const int64_t bytes = problem_.pairs * problem_.values.width * storage_bits(problem_.activations) / 8;
    for (int64_t i = 0; i < problem_.batch; ++i) {
      uint8_t* rows = static_cast<uint8_t*>(problem_.output) + i * problem_.tokens * bytes;
      std::fill(rows + problem_.new_tokens(i) * bytes, rows + problem_.tokens * bytes, uint8_t{0});
    }
  }

  // The longest blocks come first, so that no thread is left with one at the end.
  std::vector<Block> make_blocks(int64_t rows) const {
    std::vector<Block> blocks;
    for (int64_t sequence = 0; sequence < problem_.batch; ++sequence) {
      const int64_t of_pair = problem_.new_tokens(sequence) * problem_.group();
      for (int64_t kv_pair = 0; kv_pair < problem_.kv_pairs; ++kv_pair) {
        for (int64_t row = 0; row < of_pair; row += rows) {
          blocks.push_back({sequence, kv_pair, row, std::min(rows, of_pair - row)});
        }
      }
    }
    const auto dearer = [this](const Block& a, const Block& b) { return cost(a) > cost(b); };
    std::stable_sort(blocks.begin(), blocks.end(), dearer);
    return blocks;
  }

  int64_t cost(const Block& block) const {
    return block.rows * (problem_.start[block.sequence] + (block.first_row + block.rows) / problem_.group());
  }

  // Magnitudes that rows share, [B, h, 2].
  std::vector<float> measure(const Kernel& best, const std::vector<Block>& blocks) {
    std::vector<std::vector<float>> of_blocks(blocks.size());
    parallel(blocks.size(), [&](int64_t i) {
      of_blocks[i].resize(2 * blocks[i].rows);
      best.measure(problem_, blocks[i], of_blocks[i].data());
    });
    std::vector<float> largest(problem_.batch * problem_.pairs * 2, 0.0f);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const Block& block = blocks[i];
      for (int64_t row = 0; row < block.rows; ++row) {
        const int64_t pair = block.kv_pair * problem_.group() + (block.first_row + row) % problem_.group();
        float* of_pair = &largest[(block.sequence * problem_.pairs + pair) * 2];
        for (int map = 0; map < 2; ++map) of_pair[map] = std::max(of_pair[map], of_blocks[i][map * block.rows + row]);
      }
    }
    const int64_t together = problem_.logits.granularity == Granularity::kHead   ? 1
                             : problem_.logits.granularity == Granularity::kPair ? 2
                                                                                 : 2 * problem_.pairs;
    for (auto each = largest.begin(); each != largest.end(); each += together) {
      std::fill(each, each + together, *std::max_element(each, each + together));
    }
    return largest;
  }

  template <class Task>
  void parallel(int64_t count, const Task& task) {
    run_in_parallel(api_, context_, count, task);
  }

  const ort::Value* value(Input input) const {
    const ort::Value* out = nullptr;
    check(ort::kGetInput(api_)(context_, place_of(input, node_.maps_), &out));
    return out;
  }
  bool present(Input input) const { return value(input) != nullptr; }

  const void* data(Input input) const { return data_of(api_, value(input)); }
  Shape shape(Input input) const { return shape_of(api_, value(input)); }
  void* output(size_t index, const Shape& shape) { return make_output(api_, context_, index, shape); }

  const Node& node_;
  const ort::Api api_;
  ort::KernelContext* const context_;
  Problem problem_;
  int64_t total_, past_rows_;
  std::vector<int64_t> start_, length_;
};

void Node::compute(ort::KernelContext* context) const { Call(*this, context).compute(); }

}  // namespace diffquant
