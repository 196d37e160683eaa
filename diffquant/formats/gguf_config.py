"""Converts the metadata of a Llama's GGUF file to the content of config.json.

Every key of the model's own has a place here: it is read, it changes nothing, or it changes nothing at the value it
has. Any other is refused, since a model without what it says would be computed wrongly.
"""

from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.formats.gguf_ends import end_tokens
from diffquant.formats.gguf_header import Header, Value
from diffquant.formats.gguf_rope import FACTORS, Factors, rope_parameters

_SIZES = {
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
# What LlamaConfig has where a file says nothing, as a test checks.
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
_WIDTHS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_READ = {
    *_SIZES.values(), *_WIDTHS, "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length",
}  # fmt: skip
# The layout that a converter found, whether a model was trained again after scaling, how embeddings are pooled, and
# what norms with a mean have.
_WITHOUT_EFFECT = {
    "tensor_data_layout", "rope.scaling.finetuned", "pooling_type", "attention.layer_norm_epsilon",
}  # fmt: skip
# The values at which these change nothing. llama.cpp reads of them attention.causal and what is about experts, and
# leaves the others to other architectures; a file that states them was made for something that is not computed here.
_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def llama_config(header: Header, factors: Factors | None, *, is_tied: bool) -> dict[str, Any]:
    """The content of config.json for the Llama in a GGUF file.

    Args:
        header: header of the file, with the ids of `gguf_ends.ENDS`.
        factors: divisors of the frequencies that the file holds as a tensor.
        is_tied: whether the embedding is the head.

    Raises:
        CheckpointError: the file holds another model, a part of one, or says what is not computed; keys are named.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"it holds a model of architecture {architecture!r}, but only GGUF files of Llamas can be read"
        )
    _check_whole(metadata)
    _check_keys(metadata)
    stated = {key: _uniform(metadata, _PREFIX + theirs) for key, theirs in _SIZES.items()}
    stated |= {key: metadata.get(f"tokenizer.ggml.{theirs}") for key, theirs in _TOKENS.items()}
    stated |= {"eos_token_id": end_tokens(header), "head_dim": _head_dim(metadata)}
    if stated["vocab_size"] is None:
        stated["vocab_size"] = metadata.get("tokenizer.ggml.tokens")
    config = _DEFAULTS | {key: value for key, value in stated.items() if value is not None}
    config |= _derived(config)
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
    """Check that the file is a model, and all of it.

    Raises:
        CheckpointError: it is not.
    """
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if kind != "model":
        raise CheckpointError(f"its general.type is {kind!r}, but only a whole model can be read")
    if parts not in (0, 1):
        raise CheckpointError(f"it is one of {parts} parts; put them together first: llama-gguf-split --merge")


def _check_keys(metadata: Mapping[str, Value]) -> None:
    """Check that the file states nothing about the model that we do not compute.

    Raises:
        CheckpointError: it does; every such key is named.
    """
    known = {_PREFIX + key for key in _READ | _WITHOUT_EFFECT}
    stated = [key for key in metadata if key.startswith(_PREFIX) and key not in known]
    unread = [f"{key} is {metadata[key]!r}" for key in stated if not _is_neutral(key, metadata[key])]
    if unread:
        raise CheckpointError(
            f"it has settings that diffquant does not compute: {', '.join(unread)}; where the model does not need it, "
            "gguf-new-metadata --remove-metadata KEY makes a file without"
        )


def _is_neutral(key: str, value: Value) -> bool:
    return value in _NEUTRAL.get(key.removeprefix(_PREFIX), ())


def _uniform(metadata: Mapping[str, Value], key: str) -> Value | None:
    """A size; a file may give one for each layer, and then all have to be the same.

    Raises:
        CheckpointError: they are not.
    """
    value = metadata.get(key)
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(
            f"{key} differs from layer to layer: {list(value)}, but diffquant computes one value for all layers"
        )
    return value[0]


def _head_dim(metadata: Mapping[str, Value]) -> Value | None:
    """The width of a head, which turns whole and is the same in Q, K and V.

    Raises:
        CheckpointError: the file has several.
    """
    stated = {_PREFIX + key: metadata[_PREFIX + key] for key in _WIDTHS if _PREFIX + key in metadata}
    if len(set(stated.values())) > 1:
        widths = ", ".join(f"{key} is {value}" for key, value in stated.items())
        raise CheckpointError(f"{widths}: heads of one width that turn whole are computed, as in llama.cpp")
    return next(iter(stated.values()), None)


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that a Llama's config fills in from other sizes."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return {}
    return {
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", width // heads),
    }
