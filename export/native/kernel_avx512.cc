#include "attend.h"
#include "vector_avx512.h"

namespace diffquant {

extern const Kernel kAvx512Kernel{"avx512", append<Avx512>, block_rows<Avx512>, measure<Avx512>, attend<Avx512>};

}  // namespace diffquant
