"""Reads an exported graph's inputs and outputs, and checks them before a session is opened."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from diffquant.errors import CheckpointError

# Of what a call takes and gives, the names before the layer: of rows of each token, and of states.
_ROWS, _STATES = {"past_key_values": "present"}, {"past_conv": "present_conv", "past_ssm": "present_ssm"}
_PRESENT_OF = _ROWS | _STATES
_TOKENS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class StateShape:
    """Name and size of a state that a call replaces.

    Attributes:
        input: name of the input that takes it.
        output: name of the output that gives it.
        sizes: its sizes behind the batch.
        dtype: dtype of its entries.
    """

    input: str
    output: str
    sizes: tuple[int, int]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of one sequence."""
        return self.sizes[0] * self.sizes[1] * self.dtype.itemsize


@dataclass(frozen=True)
class CacheShape:
    """Names and sizes of a model's cache: keys and values of each token, and states of a whole sequence.

    Attributes:
        inputs: names of the inputs that take keys and values of the past, by layer and part.
        outputs: names of the outputs that give those of the present, in the same order.
        kv_pairs: number h_kv of KV pairs.
        width: entries that a KV pair stores a token, two codes of 4 bits to an entry.
        dtype: dtype of the entries.
        states: states beside keys and values; none in a Transformer.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kv_pairs: int
    width: int
    dtype: np.dtype
    states: tuple[StateShape, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        return len(self.inputs) * self.kv_pairs * self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes that the states of one sequence take."""
        return sum(state.nbytes for state in self.states)


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
    logits, past = outputs["logits"], list(filter(_is_past, inputs))
    _, positions, vocabulary = logits.shape.dim
    cache = _cache_shape(inputs, past) if past else None
    return Interface(cache, vocabulary.dim_value, logits.elem_type, positions.dim_value != 1)


def _problems(
    inputs: Mapping[str, onnx.TypeProto.Tensor], outputs: Mapping[str, onnx.TypeProto.Tensor]
) -> Iterator[str]:
    past = list(filter(_is_past, inputs))
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
    shapes = {name: [dim.dim_value for dim in inputs[name].shape.dim] for name in past}
    states, rows = (list(filter(of_kind, past)) for of_kind in (_is_state, lambda name: not _is_state(name)))
    if not all(len(shapes[name]) == 3 and 0 not in shapes[name][2:] for name in states):
        yield "its states are not [batch, size, size]"
    if states and not rows:
        yield "it has states and no keys"
    kinds = {(inputs[name].elem_type, *shapes[name]) for name in rows}
    if len(kinds) > 1 or any(len(kind) != 5 or 0 in (kind[0], kind[2], kind[4]) for kind in kinds):
        yield "its caches are not [batch, KV pairs, tokens, width] of one type each"


def _cache_shape(inputs: Mapping[str, onnx.TypeProto.Tensor], past: list[str]) -> CacheShape:
    rows = tuple(name for name in past if not _is_state(name))
    kind = inputs[rows[0]]
    _, kv_pairs, _, width = (dim.dim_value for dim in kind.shape.dim)
    states = tuple(_state_shape(name, inputs[name]) for name in past if _is_state(name))
    return CacheShape(rows, tuple(map(_present, rows)), kv_pairs, width, _dtype(kind), states)


def _state_shape(name: str, kind: onnx.TypeProto.Tensor) -> StateShape:
    _, first, second = (dim.dim_value for dim in kind.shape.dim)
    return StateShape(name, _present(name), (first, second), _dtype(kind))


def _dtype(kind: onnx.TypeProto.Tensor) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(kind.elem_type)


def _is_past(name: str) -> bool:
    """Whether an input takes what an earlier call gave."""
    return name.partition(".")[0] in _PRESENT_OF


def _is_state(past: str) -> bool:
    """Whether an input takes a state, and not rows of each token."""
    return past.partition(".")[0] in _STATES


def _present(past: str) -> str:
    """Name of the output that gives what an input takes, and more."""
    kind, _, layer = past.partition(".")
    return f"{_PRESENT_OF[kind]}.{layer}"
