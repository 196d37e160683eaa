"""Named recipes, and the settings that reproduce how published kernels round attention's operands."""

from collections.abc import Mapping
from typing import Any

# Arguments of `Recipe.of`, by common names; int4 is also known as w4a16.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"weights": "4:g32"},
    "int8": {"weights": "8:row", "kv": "8"},
    # Weights and activations both quantized, in combinations for which engines have kernels.
    "w8a8": {"weights": "8:row", "activations": "8:row"},
    "fp8": {"weights": "e4m3:row", "activations": "e4m3:row"},
    "w4a8": {"weights": "4:g32", "activations": "8:row"},
    # The least KL of the caches in research/pages/kv.md that take at most 30 % of 16 bits in long contexts.
    "kv-4bit-best": {"k": "4:c32", "v": "4:row:rotated", "residual": 64},
    "paper": {"logits": "4:tensor"},
}
# Arguments of `Recipe.of` that round attention's operands as published kernels do; they can be added to any preset. Two
# things differ in all of them: kernels round P relative to the largest logit of the keys read so far, here it is the
# largest of the row; and kernels accumulate in fewer bits, here sums are exact.
LIKE: Mapping[str, Mapping[str, Any]] = {
    # SageAttention 2 as released (qk_int8_pv_fp8, per thread), without its factor 2.25 of V for half-precision sums.
    "sage2": {"qk": "8:thread:smooth", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # The same paper's INT4 variant, arXiv 2411.10958, which also subtracts the queries' mean.
    "sage2-int4": {"qk": "4:thread:smooth:smoothq", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # SageAttention 3, arXiv 2505.11594: a tensor scale of 1/(448·6) for P, none for Q, K and V. The kernel divides P by
    # block scales before they are rounded to e4m3; here P is divided by the rounded ones, as Q, K and V are.
    "sage3": {"qk": "nvfp4:smooth:smoothq", "p": "nvfp4:fullsum", "pv": "nvfp4"},
    # FlashAttention-3, arXiv 2407.08608, section 3.3: a scale per block, and rotated Q and K. The released kernel does
    # not rotate, and takes one scale per sequence and KV head from its caller. Both map P's maximum to 2^8.
    "fa3-fp8": {"qk": "e4m3:b128:rotated", "p": "e4m3:row:pow2:fullsum", "pv": "e4m3:b128"},
    # ModelOpt's q, k, p and v_bmm_quantizer in NVFP4: a tensor scale of 1/(448·6) for P, none for K and V. There Q, if
    # quantized dynamically, also has a tensor scale, which only matters if block scales would leave e4m3's range.
    "modelopt-nvfp4": {"qk": "nvfp4", "p": "nvfp4:fullsum", "pv": "nvfp4"},
}
