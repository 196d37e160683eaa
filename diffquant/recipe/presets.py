"""Named recipes, and the settings that reproduce how published kernels round attention's operands."""

from collections.abc import Mapping
from typing import Any

# Arguments of `Recipe.of` by the field's own names; 4-bit weights beside 16-bit activations are known as w4a16 too.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"weights": "4:g32"},
    "int8": {"weights": "8:row", "kv": "8"},
    # Weights and activations of 8 bits, or 4 and 8, as engines multiply them.
    "w8a8": {"weights": "8:row", "activations": "8:row"},
    "fp8": {"weights": "e4m3:row", "activations": "e4m3:row"},
    "w4a8": {"weights": "4:g32", "activations": "8:row"},
    # The least KL of the caches of research/pages/kv.md that take at most 0.3 of 16 bits in a long context.
    "kv-4bit-best": {"k": "4:c32", "v": "4:row:rotated", "residual": 64},
    "paper": {"logits": "4:tensor"},
}
# Operands of attention as published kernels round them, also arguments of `Recipe.of`, beside any of the above. What
# all leave out: kernels round P while a row's largest logit is that of the keys read so far, and accumulate in formats
# of their own; here it is the row's own, and sums are exact.
LIKE: Mapping[str, Mapping[str, Any]] = {
    # SageAttention 2 as released (qk_int8_pv_fp8, per thread). Its V scale of 2.25 for half-precision sums is not here.
    "sage2": {"qk": "8:thread:smooth", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # The same paper's INT4, arXiv 2411.10958, whose queries lose their mean too.
    "sage2-int4": {"qk": "4:thread:smooth:smoothq", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # SageAttention 3, arXiv 2505.11594: scales of P under 1/(448·6), those of Q, K and V under none. The kernel divides
    # P by scales before they become e4m3; here it is by what they became, as the formula has it for Q, K and V.
    "sage3": {"qk": "nvfp4:smooth:smoothq", "p": "nvfp4:fullsum", "pv": "nvfp4"},
    # FlashAttention-3, arXiv 2407.08608, section 3.3: blocks, and Q and K rotated. The released kernel instead takes a
    # scale a sequence and KV head from its caller, and does not rotate; both place P's largest at 2^8.
    "fa3-fp8": {"qk": "e4m3:b128:rotated", "p": "e4m3:row:pow2:fullsum", "pv": "e4m3:b128"},
    # ModelOpt's q, k, p and v_bmm_quantizer in NVFP4: P under 1/(448·6), K and V under none. A dynamic Q has a scale of
    # its tensor above its blocks', which is left out here: it only matters where block scales leave e4m3's range.
    "modelopt-nvfp4": {"qk": "nvfp4", "p": "nvfp4:fullsum", "pv": "nvfp4"},
}
