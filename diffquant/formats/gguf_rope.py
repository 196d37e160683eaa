"""The rotary settings of a Llama's GGUF file, in the words of transformers' `rope_parameters`.

llama.cpp keeps them in two places: linear and yarn in the metadata, and what Llama 3.1 does to each pair of channels as
one divisor a pair in the tensor `rope_freqs.weight`. The settings that the divisors were computed from are found again
here, and hold only if they give the same divisors.

Source: llama.cpp, src/llama-context.cpp and conversion of Llama; transformers/modeling_rope_utils.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from diffquant.errors import CheckpointError
from diffquant.formats.gguf_header import Value

FACTORS = "rope_freqs.weight"
_THETA = 10000.0
_SCALING = "llama.rope.scaling."
# Divisors are stored in float32 and are computed from float32 frequencies.
_TOLERANCE = 1e-4

Factors = np.ndarray[Any, np.dtype[np.float64]]


def rope_parameters(metadata: Mapping[str, Value], factors: Factors | None) -> dict[str, Any]:
    """The rotary settings of a GGUF file.

    Args:
        metadata: the file's own.
        factors: [head_dim / 2] divisors of the frequencies, where the file has them.

    Raises:
        CheckpointError: they are none that can be computed here; the key or the tensor is named.
    """
    theta = _number(metadata, "llama.rope.freq_base", _THETA)
    scaling = _scaling(metadata)
    stretched = {} if factors is None else _of_factors(factors, theta)
    if scaling and stretched:
        raise CheckpointError(
            f"it scales angles twice, by {FACTORS} and by {_SCALING}type {scaling['rope_type']}, which is not computed"
        )
    return {"rope_theta": theta, "rope_type": "default"} | scaling | stretched


def _scaling(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """The scaling that the metadata state, or an empty one."""
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
        raise CheckpointError(f"{_SCALING}factor is {factor:g}, and yarn only stretches angles")
    settings: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = metadata.get(_SCALING + "original_context_length", metadata.get("llama.context_length"))
    if original is not None:
        settings["original_max_position_embeddings"] = original
    if attention != 1:
        settings["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
    return settings


def _of_factors(factors: Factors, theta: float) -> dict[str, Any]:
    """The settings that give these divisors; empty where all are 1.

    Raises:
        CheckpointError: none do.
    """
    if not np.isfinite(factors).all() or (factors <= 0).any():
        raise CheckpointError(f"{FACTORS} holds numbers that are not positive, and angles are divided by them")
    if not 0 < theta < math.inf:
        raise CheckpointError(f"llama.rope.freq_base is {theta:g}, and angles come of a positive number")
    largest = float(factors.max())
    if np.allclose(factors, largest, rtol=_TOLERANCE, atol=0):
        return {} if abs(largest - 1) < _TOLERANCE else {"rope_type": "linear", "factor": largest}
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    nearest, gap = None, math.inf
    for original, high in _guesses(factors, wavelengths):
        gaps = np.abs(llama3_factors(wavelengths, largest, high, original) / factors - 1)
        if gaps.max() < gap:
            nearest, gap = gaps, float(gaps.max())
        if gap < _TOLERANCE:
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original) if original.is_integer() else original,
            }
    where = "" if nearest is None else f"; the nearest settings differ at pair {int(nearest.argmax())} by {gap:.2g}"
    raise CheckpointError(
        f"{FACTORS} divides the frequencies of {len(factors)} pairs of channels in a "
        f"way that no scaling of Llama 3 does{where}"
    )


def llama3_factors(wavelengths: Factors, factor: float, high: float, original: float, low: float = 1.0) -> Factors:
    """Divisors of Llama 3.1's scaling for the frequencies of these wavelengths.

    Source: `_compute_llama3_parameters` of transformers/modeling_rope_utils.py.
    """
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _guesses(factors: Factors, wavelengths: Factors) -> Iterator[tuple[float, float]]:
    """Original lengths and high factors that may have given the divisors, rounded ones first.

    The divisors hold two numbers, where the slope between 1 and the largest begins and ends; which low factor they were
    computed with does not show in them, and Llama's is 1.
    """
    largest = factors.max()
    is_between = (factors > 1 + _TOLERANCE) & (factors < largest * (1 - _TOLERANCE))
    smooth = (1 / factors[is_between] - 1 / largest) / (1 - 1 / largest)
    if is_between.sum() > 1:
        # smooth = original / (high - 1) / wavelength - 1 / (high - 1)
        inverse = 1 / wavelengths[is_between]
        slope, offset = map(float, np.linalg.lstsq(np.stack([inverse, np.ones_like(inverse)], 1), smooth)[0])
        # Lines that are flat or lie elsewhere begin and end at no wavelength.
        if slope > 1e-6 and offset < -1e-6:
            high, original = 1 - 1 / offset, -slope / offset
            yield float(round(original)), float(round(high))
            yield float(round(original)), round(high, 3)
            yield original, high
        return
    for high in (4.0, 2.0, 1.5, 1.2, 1.1, 1.01):
        if is_between.any():
            original = float(wavelengths[is_between][0] * (1 + smooth[0] * (high - 1)))
            yield float(round(original)), high
            yield original, high
        else:
            # Anywhere between the last pair that is left alone and the first that is stretched.
            last = wavelengths[factors < 1 + _TOLERANCE]
            yield float((last.max() if len(last) else 1.0) * high * (1 + 1e-3)), high


def _number(metadata: Mapping[str, Value], key: str, default: float) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key} is {value!r}, not a number")
    return float(value)
