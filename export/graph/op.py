"""The op `diffquant::DifferentialAttention`, version 2: its inputs, outputs and attributes.

docs/differential-attention-op.md is the specification; a test compares it with these names.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from onnx import FunctionProto, parser

from diffquant.errors import UsageError
from diffquant.onnx.options import LOGIT_GRANULARITIES

DOMAIN = "diffquant"
# Domain of ONNX Runtime's contrib operators.
CONTRIB = "com.microsoft"
NAME = "DifferentialAttention"
VERSION = 2

KV_BITS = (0, 4, 6, 8)
# Optional inputs: factors of the signal map's output, and of the whole output.
GATES = ("signal_gate", "output_gate")
INPUTS = (
    "query", "key", "value", "lambda", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "k_scale", "v_scale", *GATES,
)  # fmt: skip
SIGNATURE = f"{NAME} ({', '.join(INPUTS)}) => (output, present_key, present_value)"


@dataclass(frozen=True)
class AttentionAttributes:
    """Attributes of a DifferentialAttention node; nodes have all of them, since kernels do not see defaults.

    Attributes:
        num_pairs: number h of pairs, each a signal head and a noise head.
        num_kv_pairs: number h_kv of KV pairs; divides h.
        generation: 1 if each map has its own keys (V1), 2 if both maps share keys (V2).
        scale: factor of Q·Kᵀ.
        do_rotary: flag; 1 rotates Q and K by cos_cache and sin_cache first.
        rotary_interleaved: flag; 1 rotates channels (2i, 2i + 1) of a head together. 0 rotates (i, i + d/2) of a head
            with d channels, in generation 2 only.
        local_window_size: number of newest keys that a query sees, its own included; -1 for all.
        kv_bit_width: bits of the caches' codes; 0 if the caches have the input's type.
        logit_bits: width of the simulated logits' codes; 0 leaves logits unquantized.
        logit_granularity: which logits share a scale, "row", "head", "pair" or "tensor".
        logit_shift: flag; 1 subtracts each row's maximum before rounding.
        signals_per_noise: number r of pairs that share a noise head; divides h, and h_kv divides h / r.
    """

    num_pairs: int
    num_kv_pairs: int
    generation: int
    scale: float
    do_rotary: int = 0
    rotary_interleaved: int = 0
    local_window_size: int = -1
    kv_bit_width: int = 0
    logit_bits: int = 0
    logit_granularity: str = "row"
    logit_shift: int = 0
    signals_per_noise: int = 1

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UsageError(f"{DOMAIN}::{NAME}: {'; '.join(problems)}")

    @property
    def num_noise_heads(self) -> int:
        """Number n = h / r of noise heads."""
        return self.num_pairs // self.signals_per_noise

    @property
    def query_heads(self) -> int:
        """Number h + n of query heads: h signal heads and n noise heads."""
        return self.num_pairs + self.num_noise_heads

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    def _problems(self) -> Iterator[str]:
        if min(self.num_pairs, self.num_kv_pairs) < 1 or self.num_pairs % self.num_kv_pairs:
            yield f"num_kv_pairs {self.num_kv_pairs} does not divide num_pairs {self.num_pairs}"
        sharing = self.signals_per_noise * self.num_kv_pairs
        if self.signals_per_noise < 1 or self.num_pairs % max(sharing, 1):
            yield f"signals_per_noise {self.signals_per_noise} times num_kv_pairs does not divide num_pairs"
        if not math.isfinite(self.scale) or self.scale == 0:
            yield f"scale is {self.scale}; it must be a finite number other than 0"
        if self.generation not in (1, 2):
            yield f"generation is {self.generation}; it must be 1 or 2"
        if self.generation == 1 and self.do_rotary and not self.rotary_interleaved:
            yield "generation 1 rotates interleaved channels; reorder the rows of the q and k projections"
        if self.local_window_size != -1 and self.local_window_size < 1:
            yield f"local_window_size is {self.local_window_size}; it must be -1 or at least 1"
        if self.kv_bit_width not in KV_BITS:
            yield f"kv_bit_width is {self.kv_bit_width}; it must be one of {', '.join(map(str, KV_BITS))}"
        if self.logit_bits and not 2 <= self.logit_bits <= 8:
            yield f"logit_bits is {self.logit_bits}; it must be 0 or 2 to 8"
        if self.logit_granularity not in LOGIT_GRANULARITIES:
            yield f"logit_granularity is {self.logit_granularity!r}; it must be {', '.join(LOGIT_GRANULARITIES)}"


def make_function(
    signature: str, text: str, opset: int, attributes: Iterable[str] = (), has_contrib: bool = False
) -> FunctionProto:
    """Make an ONNX function in the domain `diffquant`.

    Args:
        signature: name, inputs and outputs, as "Op (x) => (y)".
        text: nodes of the body, in the syntax of onnx's parser.
        opset: the model's version of the standard ONNX domain.
        attributes: names of the function's attributes.
        has_contrib: whether some nodes are ONNX Runtime's contrib operators.
    """
    name, _, rest = signature.partition(" ")
    domains = f'"" : {opset}' + (f', "{CONTRIB}" : 1' if has_contrib else "")
    listed = f" <{', '.join(attributes)}>" if attributes else ""
    return parser.parse_function(
        f'<opset_import: [{domains}], domain: "{DOMAIN}">\n{name}{listed} {rest}\n{{\n{text}\n}}'
    )
