"""Adapters for microsoft/unilm's DIFF V1 and V2 attention inside Llama's layer.

unilm publishes attention modules, not whole checkpoints: the config.json is Llama's with model_type diff_v1 or diff_v2.
`num_attention_heads` counts query heads (two per pair), `num_key_value_heads` key heads (V1: two per KV pair; V2: one).
In V2 the default of `head_dim` is hidden_size / pairs, as in unilm. Three keys are defined by this package:

- `rope_style` is "interleaved", as in unilm, or "half".
- `rope_angles` is "llama", or "linspace" for the angles of unilm's decoder.
- `gqa_pairing`, for V1, is "flash", or "plain" for checkpoints trained with unilm's plain attention file, which pairs K
  heads after repeating them.

A V1 checkpoint without any `subln.weight` dates from before October 2024, when the per-pair norm had no weight.
"""

from typing import Any, Literal

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters.base import Adapter, count_pairs, refuse_settings, register
from diffquant.model.adapters.sizes import DIFFLLAMA, read_sizes, v1_spec
from diffquant.model.architecture import TransformerArchitecture

_SUBLN_EPS = 1e-5
# Settings that users' own training code may write, with the values that have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "lambda_init": (None,),
    "attention_multiplier": (None,),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (None, 1)),
    "no_rope_layers": (None, []),
}


@register("diff_v1")
def read_unilm_v1(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `diff_v1` config.json.

    Source: microsoft/unilm, Diff-Transformer/multihead_diffattn.py and multihead_flashdiff_1.py.
    """
    refuse_settings(config, _NEUTRAL)
    sizes = read_sizes(config, DIFFLLAMA)
    sizes["rope_parameters"] = _rotary(config, sizes)
    source_heads = sizes["num_key_value_heads"]
    count_pairs(source_heads, "num_key_value_heads")
    if _choice(config, "gqa_pairing", ("flash", "plain")) == "plain":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    spec = v1_spec(sizes, post_norm="affine", post_norm_eps=_SUBLN_EPS, rope=_rope_style(config))
    return Adapter(
        TransformerArchitecture(**sizes, diff_spec=spec),
        renames={".self_attn.o_proj.": ".self_attn.out_proj."},
        kv_repeats=sizes["num_key_value_heads"] // source_heads,
        may_lack_norm_weight=True,
    )


@register("diff_v2")
def read_unilm_v2(config: dict[str, Any]) -> Adapter:
    """Create the adapter for a `diff_v2` config.json.

    Source: microsoft/unilm, Diff-Transformer/Diff-Transformer-V2.
    """
    refuse_settings(config, _NEUTRAL)
    sizes = read_sizes(config, DIFFLLAMA)
    pairs = count_pairs(sizes["num_attention_heads"], "num_attention_heads")
    if config.get("head_dim") is None:
        sizes["head_dim"] = sizes["hidden_size"] // pairs
    sizes["rope_parameters"] = _rotary(config, sizes)
    spec = DiffSpec(
        pairs=pairs,
        kv_pairs=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        value_dim=sizes["head_dim"],
        shared_k=True,
        lam="sigmoid",
        rope=_rope_style(config),
    )
    return Adapter(TransformerArchitecture(**sizes, diff_spec=spec))


def _rotary(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Return Llama's rotary settings for the angles that `rope_angles` selects.

    For "linspace" the angles are θ^-linspace(0, 1, n) with n = d/2. The i-th is θ^(-i/(n-1)), which equals Llama's
    θ'^(-i/n) with θ' = θ^(n/(n-1)).

    Source: microsoft/unilm, YOCO/yoco/models/decoder/yoco.py, build_rel_pos.
    """
    rope: dict[str, Any] = sizes["rope_parameters"]
    angles = sizes["head_dim"] // 2
    if _choice(config, "rope_angles", ("llama", "linspace")) == "llama" or angles < 2:
        return rope
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"config.json: rope_angles is linspace and rope_type {rope['rope_type']!r}, which stretches Llama's "
            "angles; leave out one of them"
        )
    return rope | {"rope_theta": float(rope["rope_theta"]) ** (angles / (angles - 1))}


def _rope_style(config: dict[str, Any]) -> Literal["interleaved", "half"]:
    return "half" if _choice(config, "rope_style", ("interleaved", "half")) == "half" else "interleaved"


def _choice(config: dict[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value: str = config.get(key, choices[0])
    if value not in choices:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be {' or '.join(choices)}")
    return value
