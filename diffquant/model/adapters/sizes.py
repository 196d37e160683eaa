"""Sizes and settings of a config.json, what it leaves out filled in as its library does.

transformers' own config classes would read them, but importing them takes seconds; tests hold these to those.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.activations import activation_named
from diffquant.model.adapters.base import count_pairs, is_a, not_valid
from diffquant.model.adapters.rotary import read_rope
from diffquant.model.transformer import DEFAULTS, TransformerArchitecture

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Beyond it no size of a model lies, and beyond 2^63 none that torch takes.
_LARGEST = 2**40
# Defaults of LlamaConfig and DiffLlamaConfig; SIZES must be stated.
LLAMA: Mapping[str, Any] = {
    **{key: DEFAULTS[key] for key in DEFAULTS if key not in SIZES},
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DIFFLLAMA = {**LLAMA, "rms_norm_eps": 1e-5}

_HINTS = get_type_hints(TransformerArchitecture)


def _types(key: str) -> tuple[type, ...]:
    """Types that a field of the architecture has, and null where the config may leave it to other sizes."""
    hint = _HINTS[key] | None if LLAMA[key] is None else _HINTS[key]
    return tuple(get_origin(kind) or kind for kind in get_args(hint) or (hint,))


_TYPES = {key: _types(key) for key in LLAMA}


def read_sizes(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a `TransformerArchitecture` but its `diff_spec`.

    Args:
        config: config.json.
        defaults: value of each field that the config may leave out.

    Raises:
        CheckpointError: sizes are missing, settings are of a wrong type or contradict each other (all are named), or
            the activation is not computed.
    """
    sizes = {key: config.get(key, defaults.get(key)) for key in (*SIZES, *_TYPES)}
    missing = [key for key in SIZES if not is_a(sizes[key], (int,)) or sizes[key] < 1]
    if missing:
        raise CheckpointError(f"config.json lacks a positive {', '.join(missing)}")
    wrong = [
        f"{key} is {sizes[key]!r}, not {' or '.join('null' if t is type(None) else t.__name__ for t in types)}"
        for key, types in _TYPES.items()
        if not is_a(sizes[key], types)
    ]
    if wrong:
        raise CheckpointError(f"{not_valid(config)}: {'; '.join(wrong)}")
    _check_ranges(config, sizes)
    activation_named(sizes["hidden_act"])
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes | {"rope_parameters": read_rope(config, sizes["max_position_embeddings"])}


def _check_ranges(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that numbers lie where a model can be built and computed.

    Raises:
        CheckpointError: some do not; all are named.
    """
    positive = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    wrong = [key for key in (*SIZES, *positive) if sizes[key] is not None and not 0 < sizes[key] < _LARGEST]
    wrong += [key for key in ("rms_norm_eps", "initializer_range") if not 0 <= sizes[key] < math.inf]
    pad = sizes["pad_token_id"]
    if pad is not None and not -sizes["vocab_size"] <= pad < sizes["vocab_size"]:
        wrong.append("pad_token_id")
    ends = sizes["eos_token_id"]
    if isinstance(ends, list) and not all(is_a(token, (int,)) for token in ends):
        wrong.append("eos_token_id")
    if wrong:
        raise CheckpointError(f"{not_valid(config)}: {', '.join(f'{key} is {sizes[key]!r}' for key in wrong)}")


def check_width(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Check that heads divide the width, as LlamaConfig demands whatever `head_dim` is.

    Raises:
        CheckpointError: the heads do not divide it.
    """
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if width % heads:
        raise CheckpointError(
            f"{not_valid(config)}: hidden_size {width} is not a multiple of num_attention_heads {heads}"
        )


def read_eps(config: Mapping[str, Any], key: str, default: float = 1e-5) -> float:
    """Epsilon of a norm.

    Raises:
        CheckpointError: it is none.
    """
    eps = config.get(key, default)
    if not isinstance(eps, float) or not 0 <= eps < math.inf:
        raise CheckpointError(f"{not_valid(config)}: {key} is {eps!r}, not a float from 0 on")
    return eps


def v1_spec(sizes: Mapping[str, Any], **own: Any) -> DiffSpec:
    """DIFF V1's attention: two heads a pair unless `own` counts pairs, whose values are twice as wide as its keys.

    Raises:
        CheckpointError: heads make up no pairs, or fields of `own` contradict them.
    """
    counts = {"pairs": "num_attention_heads", "kv_pairs": "num_key_value_heads"}
    own |= {field: count_pairs(sizes[key], key) for field, key in counts.items() if field not in own}
    width = sizes["head_dim"]
    return DiffSpec(head_dim=width, value_dim=2 * width, lam="exp", scale_by_init=True, **own)
