"""Adds nodes for padding, given by an attention mask in transformers' form: one column per token, 0 for padding.

Attention ops know only the length of each sequence, and expect its tokens before its padding. So a graph moves the
tokens to the front, in order, and the hidden states that the head reads back to their columns. Positions, caches and
Mamba's states are then those of the sequence without padding, whichever side the caller pads.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto, helper

# Not imported at run time: `enable_all_logits` must work without torch.
if TYPE_CHECKING:
    from diffquant.onnx.graph.nodes import Graph

SEQUENCE = "sequence"
_PLACES, _STATES_READ = "places", "states_read"
# In graphs of earlier versions, which did not move tokens.
_LAST_POSITION = "last_position"
# Names of the node that fails if the mask is not supported; ONNX Runtime's error shows the name.
_ALONE = "attention_mask is 0 for the only new token of a sequence: set the last column, which is that token's, to 1"
_SCALED = "attention_mask is 0 for a new token behind a cache: it would change the scale of quantized logits"


@dataclass(frozen=True)
class TokenInputs:
    """Names of values that describe the T new tokens of each of B sequences in a call.

    Attributes:
        ids: token ids [B, T], each sequence's tokens before its padding.
        counts: number of new tokens of each sequence without padding [B, 1].
        before: number of cached tokens of each sequence [B, 1].
        steps: the numbers 0 to T - 1, [T].
        places: index in `ids` of the token in each of the caller's columns [B, T]; arbitrary for padding.
        last_place: index in `ids` of each sequence's last token [B, 1].
        lengths: the attention ops' inputs seqlens_k [B] and total_sequence_length.
    """

    ids: str
    counts: str
    before: str
    steps: str
    places: str
    last_place: str
    lengths: tuple[str, str]


def add_padding_shift(graph: "Graph", ids: str, mask: str, spans_rows: bool) -> TokenInputs:
    """Add nodes that move each sequence's tokens before its padding; return the names of the values they compute.

    Args:
        ids: name of the token ids [B, T].
        mask: name of the attention mask [B, S], whose last T columns are those of the ids.
        spans_rows: whether several tokens share a scale of quantized logits. Padding behind a cache would change the
            scale, so a run of the graph then fails if the mask has such padding.
    """
    one, axis = graph.int64("one", (1,)), graph.int64("mask_axis", (1,))
    new, total = graph.add("Shape", ids, start=1, end=2), graph.add("Shape", mask, start=1, end=2)
    is_first = graph.add("Equal", new, total)
    new_mask = graph.add("Slice", mask, graph.add("Sub", total, new), total, axis)
    scalars = [graph.constant(f"scalar.{value}", np.array(value, np.int64)) for value in (0, 1)]
    counted = graph.add("CumSum", new_mask, scalars[1])
    # For an unsupported mask, a Gather gets an index out of range, so that the run fails.
    limited = graph.add("Not", is_first) if spans_rows else graph.add("Equal", new, one)
    refused = graph.add("Mul", graph.add("Sub", one, new_mask), graph.add("Cast", limited, to=TensorProto.INT64))
    less_one = graph.add("Gather", graph.int64("minus_one", (-1,)), refused)
    graph.nodes[-1].name = _SCALED if spans_rows else _ALONE
    zero, end = graph.int64("zero", (0,)), graph.int64("end", (np.iinfo(np.int64).max,))
    places = graph.add("Max", graph.add("Add", counted, less_one), zero, name=_PLACES)
    last = graph.int64("last", (-1,))
    counts, last_place = (graph.add("Slice", x, last, end, axis) for x in (counted, places))
    before = graph.add("Sub", graph.add("ReduceSum", mask, axis, keepdims=1), counts)
    # Behind a cache, ops treat all new tokens as real: rows of padding come last, and the next call overwrites them.
    whole = graph.add("Sub", graph.add("Add", before, new), one)
    seqlens = graph.add("Squeeze", graph.add("Where", is_first, last_place, whole), axis)
    steps = graph.add("Range", scalars[0], graph.add("Squeeze", new), scalars[1])
    # Sort keys are distinct, since runtimes differ in the order of equal ones.
    keys = graph.add("Sub", graph.add("Mul", new_mask, new), steps)
    order = graph.unused_name("TopK")
    graph.add_with_outputs("TopK", [keys, new], [f"{order}_keys", order], axis=1)
    lengths = (
        graph.add("Cast", seqlens, name="seqlens_k", to=TensorProto.INT32),
        graph.add("Cast", graph.add("Squeeze", total), name="total_sequence_length", to=TensorProto.INT32),
    )
    moved = graph.add("GatherElements", ids, order, axis=1)
    return TokenInputs(moved, counts, before, steps, places, last_place, lengths)


def gather_head_inputs(graph: "Graph", x: str, places: str) -> str:
    """Add a gather of the hidden states that the head reads, and return the name of the result [B, n, D].

    Args:
        x: name of the hidden states [B, T, D].
        places: name of the indices [B, n] of the tokens to gather.
    """
    index = graph.add("Unsqueeze", places, graph.int64("channels_axis", (2,)))
    return graph.add("GatherND", x, index, name=_STATES_READ, batch_dims=1)


def enable_all_logits(model: ModelProto) -> bool:
    """Change a graph so that it computes the logits of every position; return whether the graph was changed."""
    maker = {output: node for node in model.graph.node for output in node.output}
    if _LAST_POSITION in maker:
        node = maker[_LAST_POSITION]
        node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))
    else:
        read = maker.get(_STATES_READ)
        index = maker.get(read.input[1]) if read is not None and len(read.input) > 1 else None
        if index is None or index.input[0] == _PLACES:
            return False
        index.input[0] = _PLACES
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_param = SEQUENCE
    return True
