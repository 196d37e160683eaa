// Memory a block works in, kept by its thread from call to call: fresh pages would cost more than the arithmetic.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "scalar.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

namespace diffquant {
namespace {

class Scratch {
 public:
  static Scratch& of_this_thread() {
    thread_local Scratch scratch;
    return scratch;
  }

  // Forgets what was taken and makes sure that `floats` can be, `parts` pieces at most.
  void reset(int64_t floats, int64_t parts) {
    taken_ = 0;
    const int64_t needed = floats + parts * 2 * kAlignment;
    if (needed > held_) grow(needed);
    ASAN_POISON_MEMORY_REGION(data_, held_ * sizeof(float));
  }

  float* take(int64_t floats) {
    float* out = data_ + taken_;
    ASAN_UNPOISON_MEMORY_REGION(out, floats * sizeof(float));
    // A gap follows every piece: a sanitizer sees what runs over the piece's end.
    taken_ += round_up(floats, kAlignment) + kAlignment;
    return out;
  }

  ~Scratch() { release(); }

 private:
  static constexpr int64_t kAlignment = 16;

  void grow(int64_t floats) {
    release();
    data_ = static_cast<float*>(std::aligned_alloc(64, round_up(floats * sizeof(float), 64)));
    if (!data_) throw std::bad_alloc();
    held_ = floats;
  }

  void release() {
    ASAN_UNPOISON_MEMORY_REGION(data_, held_ * sizeof(float));
    std::free(data_);
    data_ = nullptr;
    held_ = 0;
  }

  float* data_ = nullptr;
  int64_t held_ = 0, taken_ = 0;
};

}  // namespace
}  // namespace diffquant
