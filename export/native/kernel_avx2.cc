#include "attend.h"
#include "vector_avx2.h"

namespace diffquant {

extern const Kernel kAvx2Kernel{"avx2", append<Avx2>, block_rows<Avx2>, measure<Avx2>, attend<Avx2>};

}  // namespace diffquant
