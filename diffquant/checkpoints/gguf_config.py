"""Converts the metadata of a Llama's GGUF file to the content of config.json.

Every metadata key about the model is read, has no effect, or has no effect at the value it has. Any other key is
refused, since the model would be computed wrongly without it.
"""

from collections.abc import Mapping
from typing import Any

from diffquant.checkpoints.gguf_header import Value
from diffquant.checkpoints.gguf_rope import FACTORS, Factors, rope_parameters
from diffquant.checkpoints.gguf_tokenizer import make_eos_token_id
from diffquant.errors import CheckpointError

# In the order of a Llama's layer.
IN_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


SIZES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}
# LlamaConfig's defaults for what a file leaves out; a test checks them.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
_PREFIX = "llama."
WIDTHS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_READ = {
    *SIZES.values(), *WIDTHS, "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
}  # fmt: skip
# Keys without effect: the layout that a converter found, whether the model was fine-tuned after RoPE scaling, the
# pooling of embeddings, and the epsilon of LayerNorm, which a Llama does not have.
_WITHOUT_EFFECT = {
    "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "attention.layer_norm_epsilon",
}  # fmt: skip
# Values at which these keys have no effect. For a Llama, llama.cpp reads only attention.causal and the keys on experts.
# The others are for other architectures; a file with another value needs something that is not computed here.
_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    **dict.fromkeys((
        "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attention.sliding_window",
        "attn_logit_softcapping", "expert_count", "expert_group_count", "expert_group_used_count",
        "expert_shared_count", "expert_used_count", "final_logit_softcapping", "leading_dense_block_count",
        "nextn_predict_layers", "rope.scaling.yarn_log_multiplier",
    ), (0,)),
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_slow"), (1,)),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "attention.causal": (True,),
}  # fmt: skip


def make_llama_config(
    metadata: Mapping[str, Value], ids: Mapping[str, int], factors: Factors | None, *, is_tied: bool
) -> dict[str, Any]:
    """Make the content of config.json for the Llama in a GGUF file.

    Args:
        metadata: metadata of the file.
        ids: id of each token of `gguf_tokenizer.ENDS` that is in the vocabulary.
        factors: [head_dim / 2] divisors of the rotary frequencies, or None if the file has no such tensor.
        is_tied: whether embedding and head share their weight.

    Raises:
        CheckpointError: the file holds another or incomplete model, or unsupported settings; the message names keys.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"it holds a model of architecture {architecture!r}, but only GGUF files of Llamas are supported"
        )
    _check_whole(metadata)
    _check_keys(metadata)
    stated = {key: _read_uniform(metadata, _PREFIX + theirs) for key, theirs in SIZES.items()}
    stated |= {key: metadata.get(f"tokenizer.ggml.{theirs}") for key, theirs in _TOKENS.items()}
    stated |= {"eos_token_id": make_eos_token_id(metadata, ids), "head_dim": _head_dim(metadata)}
    if stated["vocab_size"] is None:
        stated["vocab_size"] = metadata.get("tokenizer.ggml.tokens")
    config = _DEFAULTS | {key: value for key, value in stated.items() if value is not None}
    config |= _derive(config)
    width = config.get("head_dim")
    pairs = width // 2 if isinstance(width, int) else 0
    if factors is not None and (len(factors) != pairs or not pairs):
        raise CheckpointError(f"{FACTORS} has {len(factors)} numbers for the {pairs} pairs of channels of a head")
    return config | {
        "dtype": "float32",
        "tie_word_embeddings": is_tied,
        "rope_parameters": rope_parameters(metadata, factors),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def _check_whole(metadata: Mapping[str, Value]) -> None:
    """Check that the file holds a complete model.

    Raises:
        CheckpointError: it is not.
    """
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if kind != "model":
        raise CheckpointError(f"its general.type is {kind!r}, but only a whole model can be read")
    if parts not in (0, 1):
        raise CheckpointError(f"it is one of {parts} parts; merge them first: llama-gguf-split --merge")


def _check_keys(metadata: Mapping[str, Value]) -> None:
    """Check that every setting of the model in the file is supported.

    Raises:
        CheckpointError: some are not; every such key is named.
    """
    known = {_PREFIX + key for key in _READ | _WITHOUT_EFFECT}
    stated = [key for key in metadata if key.startswith(_PREFIX) and key not in known]
    unread = [f"{key} is {metadata[key]!r}" for key in stated if not _is_neutral(key, metadata[key])]
    if unread:
        raise CheckpointError(
            f"it has settings that diffquant does not compute: {', '.join(unread)}; if the model does not need them, "
            "remove them with gguf-new-metadata --remove-metadata KEY"
        )


def _is_neutral(key: str, value: Value) -> bool:
    return value in _NEUTRAL.get(key.removeprefix(_PREFIX), ())


def _read_uniform(metadata: Mapping[str, Value], key: str) -> Value | None:
    """Read a size; a file may give one per layer, which then have to be equal.

    Raises:
        CheckpointError: they are not.
    """
    value = metadata.get(key)
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(
            f"{key} differs from layer to layer: {list(value)}, but diffquant supports one value for all layers"
        )
    return value[0]


def _head_dim(metadata: Mapping[str, Value]) -> Value | None:
    """Return the width of a head, which rotates entirely and is the same in Q, K and V.

    Raises:
        CheckpointError: the file has several.
    """
    stated = {_PREFIX + key: metadata[_PREFIX + key] for key in WIDTHS if _PREFIX + key in metadata}
    if len(set(stated.values())) > 1:
        widths = ", ".join(f"{key} is {value}" for key, value in stated.items())
        raise CheckpointError(f"{widths}: only heads of one width that rotate entirely are supported, as in llama.cpp")
    return next(iter(stated.values()), None)


def _derive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that a Llama's config derives from other sizes."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return {}
    return {
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", width // heads),
    }
