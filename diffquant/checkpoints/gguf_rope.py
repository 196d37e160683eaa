"""Converts the rotary settings of a Llama's GGUF file to transformers' `rope_parameters`, and back.

llama.cpp stores linear and yarn scaling in the metadata, and Llama 3.1's scaling as one frequency divisor per channel
pair in the tensor `rope_freqs.weight`. The settings are found again by trying those that models have.

Source: llama.cpp, src/llama-context.cpp and conversion of Llama; transformers/modeling_rope_utils.py.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from diffquant.checkpoints.gguf_header import Value
from diffquant.errors import CheckpointError

FACTORS = "rope_freqs.weight"
_THETA = 10000.0
_SCALING = "llama.rope.scaling."
# Divisors are stored in float32 and are computed from float32 frequencies.
_TOLERANCE = 1e-4
# Settings of Llama 3.1's scaling that are tried, its own first.
_HIGH_FACTORS, _ORIGINALS = (4.0, 2.0, 6.0, 8.0), (8192, *(2**power for power in range(5, 20)))

Factors = np.ndarray[Any, np.dtype[np.float64]]


def rope_parameters(metadata: Mapping[str, Value], factors: Factors | None) -> dict[str, Any]:
    """Return the rotary settings of a GGUF file as transformers' `rope_parameters`.

    Args:
        metadata: metadata of the file.
        factors: [head_dim / 2] divisors of the rotary frequencies, if the file has them.

    Raises:
        CheckpointError: the settings are not supported; the message names the key or the tensor.
    """
    theta = _number(metadata, "llama.rope.freq_base", _THETA)
    scaling = _scaling(metadata)
    stretched = {} if factors is None else _fit_llama3(factors, theta)
    if scaling and stretched:
        raise CheckpointError(
            f"it scales angles twice, by {FACTORS} and by {_SCALING}type {scaling['rope_type']}, which is not supported"
        )
    return {"rope_theta": theta, "rope_type": "default"} | scaling | stretched


# Yarn settings that a Llama's GGUF file cannot store, with the only values that can therefore be converted.
_YARN = {"beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None, "truncate": True}


def rope_metadata(rope: Mapping[str, Any], pairs: int) -> tuple[dict[str, Any], Factors | None]:
    """Convert rotary settings to metadata and divisors of the frequencies; the inverse of `rope_parameters`.

    Args:
        rope: `rope_parameters` of an architecture.
        pairs: number of channel pairs in a head.

    Raises:
        CheckpointError: a Llama's GGUF file cannot store these settings; the message names them.
    """
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    metadata: dict[str, Any] = {"llama.rope.freq_base": theta}
    odd = [
        f"{key} {rope[key]}" for key, usual in _YARN.items() if kind == "yarn" and rope.get(key) not in (None, usual)
    ]
    if odd or kind not in ("default", "linear", "yarn", "llama3"):
        named = f"{kind} with {', '.join(odd)}" if odd else kind
        raise CheckpointError(f"a Llama's GGUF file cannot store its rope_type {named}")
    if kind == "default":
        return metadata, None
    factor = float(rope["factor"])
    if kind == "llama3":
        band = [float(rope[key]) for key in ("high_freq_factor", "original_max_position_embeddings", "low_freq_factor")]
        return metadata, llama3_factors(_wavelengths(theta, pairs), factor, *band)
    metadata |= {_SCALING + "type": kind, _SCALING + "factor": factor}
    if kind == "yarn":
        metadata[_SCALING + "original_context_length"] = int(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            metadata[_SCALING + "attn_factor"] = float(rope["attention_factor"]) / _yarn_attention(factor)
    return metadata, None


def _yarn_attention(factor: float) -> float:
    """Return the attention factor that llama.cpp and transformers compute from yarn's factor."""
    return 0.1 * math.log(factor) + 1


def _wavelengths(theta: float, pairs: int) -> Factors:
    return np.asarray(2 * math.pi * theta ** (np.arange(pairs) / pairs))


def _scaling(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """Return the scaling in the metadata; empty if there is none."""
    kind = metadata.get(_SCALING + "type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{_SCALING}type is {kind!r}, but only linear and yarn are supported")
    # Files of 2023 have the older name.
    factor = _number(metadata, _SCALING + "factor", _number(metadata, "llama.rope.scale_linear", 1.0)) or 1.0
    attention = _number(metadata, _SCALING + "attn_factor", 1.0)
    if kind == "yarn":
        return _yarn(metadata, factor, attention)
    if attention != 1:
        raise CheckpointError(f"{_SCALING}attn_factor is {attention:g}, which is supported only with type yarn")
    return {} if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(metadata: Mapping[str, Value], factor: float, attention: float) -> dict[str, Any]:
    if factor < 1:
        raise CheckpointError(f"{_SCALING}factor is {factor:g}, but yarn needs 1 or more")
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = metadata.get(_SCALING + "original_context_length", metadata.get("llama.context_length"))
    if original is not None:
        settings["original_max_position_embeddings"] = original
    if attention != 1:
        settings["attention_factor"] = attention * _yarn_attention(factor)
    return settings


def _fit_llama3(factors: Factors, theta: float) -> dict[str, Any]:
    """Find the settings that give these divisors; empty if all are 1.

    Raises:
        CheckpointError: no settings give them.
    """
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise CheckpointError(f"{FACTORS} holds divisors that are not positive")
    if not 0 < theta < math.inf:
        raise CheckpointError(f"llama.rope.freq_base is {theta:g}, expected a positive number")
    largest = float(factors.max())
    if np.allclose(factors, largest, rtol=_TOLERANCE, atol=0):
        return {} if abs(largest - 1) < _TOLERANCE else {"rope_type": "linear", "factor": largest}
    wavelengths = _wavelengths(theta, len(factors))
    for high, original in product(_HIGH_FACTORS, _ORIGINALS):
        if np.allclose(llama3_factors(wavelengths, largest, high, original), factors, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": largest,
                # The divisors do not show it; Llama's is 1.
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"the {len(factors)} frequency divisors in {FACTORS} are of no known scaling of Llama 3; "
        "start from the model's safetensors"
    )


def llama3_factors(wavelengths: Factors, factor: float, high: float, original: float, low: float = 1.0) -> Factors:
    """Compute the frequency divisors of Llama 3.1's scaling.

    Args:
        wavelengths: [head_dim / 2] wavelengths of the channel pairs, in tokens.
        factor, high, original, low: the settings factor, high_freq_factor, original_max_position_embeddings and
            low_freq_factor.

    Returns:
        [head_dim / 2], one divisor per channel pair.

    Source: `_compute_llama3_parameters` of transformers/modeling_rope_utils.py.
    """
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _number(metadata: Mapping[str, Value], key: str, default: float) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key} is {value!r}, not a number")
    return float(value)
