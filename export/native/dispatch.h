#pragma once

#include "problem.h"

namespace diffquant {

// The best kernel this processor runs, unless another was asked for.
const Kernel& kernel();

// From now on the kernel of that name (plain, avx2, avx512), if this processor runs it; returns whether it does.
bool use_kernel(const char* name);

}  // namespace diffquant
