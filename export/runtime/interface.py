"""Reads an exported graph's inputs and outputs, and checks them before a session is opened."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from diffquant.errors import CheckpointError

_PAST = "past_key_values."
_PRESENT = "present."
_TOKENS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class CacheShape:
    """Names and sizes of a model's KV cache.

    Attributes:
        inputs: names of the inputs that take the past, by layer and part.
        outputs: names of the outputs that give the present, in the same order.
        kv_pairs: number h_kv of KV pairs.
        width: entries that a KV pair stores a token, two codes of 4 bits to an entry.
        dtype: dtype of the entries.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kv_pairs: int
    width: int
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        return len(self.inputs) * self.kv_pairs * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Interface:
    """Inputs of an exported graph beside tokens and their mask, and its outputs.

    Attributes:
        cache: shape of the KV cache, or None if the model has none.
        vocabulary: number of tokens that have a logit.
        kind: ONNX's number of the logits' type.
        gives_every_position: whether there are logits of every new token, and not of each sequence's last one alone.
    """

    cache: CacheShape | None
    vocabulary: int
    kind: int
    gives_every_position: bool

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the logits."""
        return helper.tensor_dtype_to_np_dtype(self.kind)


def read_interface(graph: onnx.GraphProto, file: Path) -> Interface:
    """The interface of a graph that `diffquant export` wrote.

    Raises:
        CheckpointError: it is not that of such a graph; the message names the file and every reason.
    """
    inputs, outputs = ({v.name: v.type.tensor_type for v in values} for values in (graph.input, graph.output))
    problems = list(_problems(inputs, outputs))
    if problems:
        raise CheckpointError(f"{file} is not a model that diffquant exported: {'; '.join(problems)}; export it again")
    logits, past = outputs["logits"], [name for name in inputs if name.startswith(_PAST)]
    _, positions, vocabulary = logits.shape.dim
    cache = _cache_shape(inputs, past) if past else None
    return Interface(cache, vocabulary.dim_value, logits.elem_type, positions.dim_value != 1)


def _problems(
    inputs: Mapping[str, onnx.TypeProto.Tensor], outputs: Mapping[str, onnx.TypeProto.Tensor]
) -> Iterator[str]:
    past = [name for name in inputs if name.startswith(_PAST)]
    unknown = [name for name in inputs if name not in (*_TOKENS, *past)]
    if unknown:
        yield f"nobody knows what its inputs {', '.join(unknown)} take"
    yield from (f"it has no input {name}" for name in _TOKENS if name not in inputs)
    wanted = ["logits", *map(_present, past)]
    yield from (f"it has no output {name}" for name in wanted if name not in outputs)
    logits = outputs.get("logits")
    if logits is not None and (len(logits.shape.dim) != 3 or logits.shape.dim[2].dim_value < 1):
        yield "its logits are not [batch, sequence, vocabulary]"
    if logits is not None and logits.elem_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        yield "its logits are no floats"
    kinds = {(inputs[name].elem_type, *(dim.dim_value for dim in inputs[name].shape.dim)) for name in past}
    if len(kinds) > 1 or any(len(kind) != 5 or 0 in (kind[0], kind[2], kind[4]) for kind in kinds):
        yield "its caches are not [batch, KV pairs, tokens, width] of one type each"


def _cache_shape(inputs: Mapping[str, onnx.TypeProto.Tensor], past: list[str]) -> CacheShape:
    kind = inputs[past[0]]
    _, kv_pairs, _, width = (dim.dim_value for dim in kind.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return CacheShape(tuple(past), tuple(map(_present, past)), kv_pairs, width, dtype)


def _present(past: str) -> str:
    """Name of the output that gives what an input takes, and more."""
    return _PRESENT + past.removeprefix(_PAST)
