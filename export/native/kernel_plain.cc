#include "attend.h"
#include "vector_plain.h"

namespace diffquant {

extern const Kernel kPlainKernel{"plain", append<Plain>, block_rows<Plain>, measure<Plain>, attend<Plain>};

}  // namespace diffquant
