"""Specifies a model's attention: plain, or a generation of differential attention, with its sizes."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from diffquant.errors import CheckpointError
from diffquant.family.heads import HeadLayout, HeadOrder


@dataclass(frozen=True)
class DiffSpec:
    """Sizes and rules that define one kind of attention, differential or plain.

    Attributes:
        pairs: h, number of pairs; for a plain Transformer, number of query heads.
        kv_pairs: h_kv, number of KV pairs; divides `pairs`. For a plain Transformer, number of KV heads.
        head_dim: d, width of a query or key.
        value_dim: dv, width of a value: 2d in V1, d in V2 and plain.
        maps: number of maps: 2, or 1 for a plain Transformer.
        shared_k: whether both maps read the same keys (V2).
        head_order: order of heads in a projection's output, as in `HeadLayout`: "adjacent" or "halves".
        lam: kind of λ: "exp" (V1, one scalar per layer), "sigmoid" (V2, one per token and pair), "two-gates" (V3, one
            sigmoid per map, token and pair) or "none".
        lam_init_offset: number added to the 0-based layer index in λ_init.
        post_norm: RMSNorm over a pair's output: "none", "plain" (no weight) or "affine".
        post_norm_eps: epsilon of that norm.
        scale_by_init: whether the output is multiplied by (1 - λ_init).
        rope: channels that rotary embedding rotates together: "half" (i and i + d/2), "interleaved" (2i and 2i + 1), or
            "none" without rotary embedding.
        signals_per_noise: number of signal maps that one noise map is subtracted from.
        output_gate: whether each output channel is multiplied by a gate computed from the layer's input.

    Sources: arXiv 2410.05258, section 2; microsoft/unilm, Diff-Transformer and Diff-Transformer-V2; for "two-gates",
    DIFF V3 (YOCO); for the output gate, Motif-3.
    """

    pairs: int
    kv_pairs: int
    head_dim: int
    value_dim: int
    maps: Literal[1, 2] = 2
    shared_k: bool = False
    head_order: HeadOrder = "adjacent"
    lam: Literal["none", "exp", "sigmoid", "two-gates"] = "none"
    lam_init_offset: int = 0
    post_norm: Literal["none", "plain", "affine"] = "none"
    post_norm_eps: float = 1e-5
    scale_by_init: bool = False
    rope: Literal["half", "interleaved", "none"] = "half"
    signals_per_noise: int = 1
    output_gate: bool = False

    def __post_init__(self) -> None:
        if min(self.pairs, self.kv_pairs, self.head_dim) < 1 or self.pairs % self.kv_pairs:
            raise CheckpointError(
                f"{self.kv_pairs} KV pairs do not divide {self.pairs} query pairs; check num_attention_heads and "
                "num_key_value_heads in config.json"
            )
        if self.rope != "none" and self.head_dim % 2:
            raise CheckpointError(f"rotary embedding needs an even head width, got {self.head_dim}")
        if self.scale_by_init and self.post_norm == "none":
            raise CheckpointError("scale_by_init needs a norm: post_norm must not be 'none'")
        if self.maps == 2 and self.lam == "none":
            raise CheckpointError("two maps need a λ: lam must be 'exp', 'sigmoid' or 'two-gates'")
        if self.maps == 1 and self.lam != "none":
            raise CheckpointError(f"a single map has no noise map to weight: lam must be 'none', not {self.lam!r}")
        if (self.lam == "two-gates" or self.output_gate) and self.post_norm != "none":
            raise CheckpointError("gates followed by a norm are not supported: post_norm must be 'none'")
        grouped = self.signals_per_noise
        if grouped < 1 or (grouped > 1 and (self.maps == 1 or self.pairs % (grouped * self.kv_pairs))):
            raise CheckpointError(
                f"with {grouped} signal maps per noise map, {self.pairs} pairs cannot be divided among "
                f"{self.kv_pairs} KV pairs; check the numbers of heads in config.json"
            )

    @property
    def layout(self) -> HeadLayout:
        """Division of the projections' rows into heads."""
        return HeadLayout(
            pairs=self.pairs,
            kv_pairs=self.kv_pairs,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            maps=self.maps,
            shares_keys=self.shared_k,
            signals_per_noise=self.signals_per_noise,
            head_order=self.head_order,
            channel_order="interleaved" if self.rope == "interleaved" else "half",
        )

    @property
    def query_heads(self) -> int:
        """Number of query heads of all maps."""
        return self.layout.query_heads

    @property
    def key_heads(self) -> int:
        """Number of key heads of all maps; keys that both maps share count once."""
        return self.layout.key_heads

    @property
    def scale(self) -> float:
        """Factor of Q·Kᵀ: 1/√d."""
        return math.pow(self.head_dim, -0.5)

    @property
    def attention_name(self) -> str:
        """Public name of this kind of attention, such as "DIFF V1"."""
        if self.maps == 1:
            return "Transformer"
        grouped = "grouped " if self.signals_per_noise > 1 else ""
        generation = "DIFF V3" if self.lam == "two-gates" else "DIFF V2" if self.shared_k else "DIFF V1"
        return grouped + generation

    @property
    def gate_count(self) -> int:
        """Number of sigmoid gates per token, the rows of `lambda_proj`. In V3 a pair's signal gate precedes its λ."""
        return self.pairs * {"sigmoid": 1, "two-gates": 2}.get(self.lam, 0)

    def lam_init(self, layer: int) -> float:
        """Return λ_init of a 0-based layer: 0.8 - 0.6·exp(-0.3·(layer + lam_init_offset)).

        Source: arXiv 2410.05258, equation 3.
        """
        return 0.8 - 0.6 * math.exp(-0.3 * (layer + self.lam_init_offset))

    def norm_factor(self, layer: int) -> float:
        """Return the factor after the pair norm of a 0-based layer: 1 - λ_init, or 1 without `scale_by_init`."""
        return 1 - self.lam_init(layer) if self.scale_by_init else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the specification as plain data."""
        return asdict(self)


def read_spec(spec: Mapping[str, Any] | None) -> DiffSpec:
    """Parse the attention specification of a config.json.

    Raises:
        CheckpointError: the specification is missing, has unknown keys or values, or contradicts itself.
    """
    if not spec:
        raise CheckpointError("config.json has no `spec`: a diff_transformer checkpoint must describe its attention")
    if not isinstance(spec, Mapping):
        raise CheckpointError(f"config.json: `spec` is {spec!r}, not an object")
    # Older checkpoint folders still have this removed key; no model sets it.
    spec = {name: value for name, value in spec.items() if (name, value) != ("soft_cap", None)}
    own = fields(DiffSpec)
    problems = [f"{field.name} is missing" for field in own if field.default is MISSING and field.name not in spec]
    problems += [f"{name} is not a known key" for name in spec if name not in _KINDS]
    problems += [
        f"{name} is {value!r}, not {' or '.join(map(_kind_name, _KINDS[name]))}"
        for name, value in spec.items()
        if name in _KINDS and not any(_matches_kind(kind, value) for kind in _KINDS[name])
    ]
    if problems:
        raise CheckpointError(f"config.json: in `spec` {'; '.join(problems)}")
    return DiffSpec(**spec)


# Allowed types or allowed values of each field.
_KINDS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(DiffSpec).items()}


def _matches_kind(kind: object, value: object) -> bool:
    if isinstance(kind, type):
        return type(value) is kind or (kind is float and type(value) is int)
    # JSON's true equals 1 in Python.
    return type(value) is type(kind) and value == kind


def _kind_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else repr(kind)
