"""The tables of cosines and sines that an export rotates by, against the model's own at every position."""

from collections.abc import Mapping

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_TABLES = ("cos_cache", "sin_cache")
_CHUNK = 8192
# A cosine's own rounding, and what the last digit of a frequency does to it for each radian of its angle.
_UNIT = {"float32": 2.0**-22, "float16": 2.0**-10}
_PER_RADIAN = 2.0**-22


def rotation_excess(graph: onnx.ModelProto, rotary: LlamaRotaryEmbedding, positions: int) -> float | None:
    """How far the tables are off, in parts of what the rounding of angles, cosines and sines explains.

    Args:
        graph: exported model.
        rotary: the checkpoint's own rotation.
        positions: number of positions that the tables must have.

    Returns:
        The largest such part over all entries; infinite where positions are missing, None if nothing is rotated.
    """
    tables = {each.name: numpy_helper.to_array(each) for each in graph.graph.initializer if each.name in _TABLES}
    if not tables:
        return None
    if any(name not in tables or len(tables[name]) < positions for name in _TABLES):
        return float("inf")
    starts = range(0, positions, _CHUNK)
    return float(np.max([_excess(tables, rotary, range(at, min(at + _CHUNK, positions))) for at in starts]))


def _excess(tables: Mapping[str, np.ndarray], rotary: LlamaRotaryEmbedding, at: range) -> float:
    """The largest part at some positions."""
    places = torch.arange(at.start, at.stop)
    angle = places[:, None] * rotary.inv_freq
    unit = _UNIT[str(tables["cos_cache"].dtype)]
    allowed = rotary.attention_scaling * (unit + _PER_RADIAN * angle)
    parts = []
    for name, wanted in zip(_TABLES, rotary(torch.zeros(1), position_ids=places[None]), strict=True):
        # One after another stand the frequencies of each head of a key row.
        table = torch.from_numpy(tables[name][at.start : at.stop].astype(np.float32)).unflatten(1, (-1, angle.shape[1]))
        parts.append(((table - wanted[0, :, None, : angle.shape[1]]).abs() / allowed[:, None]).max())
    return float(torch.stack(parts).max())
