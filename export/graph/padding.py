"""Where a call's tokens are, by an attention mask as transformers means it: a column a token, 1 where it counts.

Attention ops know lengths alone, and take the tokens of a shorter sequence to come first. So each sequence's tokens
are moved before its padding on the way in, in order, and the states that the head reads are moved back. Positions,
caches and Mamba's states then are those of the sequence without its padding, wherever a caller puts that.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto, TensorProto, helper

# Who runs an exported folder changes its graph without torch.
if TYPE_CHECKING:
    from diffquant.export.graph.nodes import Graph

SEQUENCE = "sequence"
_PLACES, _STATES_READ = "places", "states_read"
# In graphs of earlier versions, which moved nothing.
_LAST_POSITION = "last_position"
# Names of the node that fails, which ONNX Runtime's error shows.
_ALONE = "attention_mask is 0 for the only new token of a sequence: its last columns are those of input_ids"
_SCALED = "attention_mask is 0 for a new token behind a cache: it would change the scale of quantized logits"


@dataclass(frozen=True)
class Tokens:
    """Names of values that say where the tokens of a call are.

    Attributes:
        ids: token ids [B, T], each sequence's tokens before its padding.
        counts: numbers of new tokens [B, 1].
        before: numbers of earlier tokens [B, 1].
        steps: 0 to T - 1, [T].
        places: places in `ids` of the tokens that the caller gave in each column [B, T]; of padding, any.
        last_place: place of each sequence's last token [B, 1].
        lengths: the ops' seqlens_k [B] and total_sequence_length.
    """

    ids: str
    counts: str
    before: str
    steps: str
    places: str
    last_place: str
    lengths: tuple[str, str]


def read_tokens(graph: "Graph", ids: str, mask: str, spans_rows: bool) -> Tokens:
    """Add the nodes that read a mask [B, S], whose last T columns are those of the ids [B, T].

    Args:
        spans_rows: whether a scale of quantized logits spans rows, of which padding behind a cache cannot be told.
    """
    one, axis = graph.int64("one", (1,)), graph.int64("mask_axis", (1,))
    new, total = graph.add("Shape", ids, start=1, end=2), graph.add("Shape", mask, start=1, end=2)
    is_first = graph.add("Equal", new, total)
    new_mask = graph.add("Slice", mask, graph.add("Sub", total, new), total, axis)
    scalars = [graph.constant(f"scalar.{value}", np.array(value, np.int64)) for value in (0, 1)]
    counted = graph.add("CumSum", new_mask, scalars[1])
    # What the ops cannot compute is looked up where nothing is.
    limited = graph.add("Not", is_first) if spans_rows else graph.add("Equal", new, one)
    refused = graph.add("Mul", graph.add("Sub", one, new_mask), graph.add("Cast", limited, to=TensorProto.INT64))
    less_one = graph.add("Gather", graph.int64("minus_one", (-1,)), refused)
    graph.nodes[-1].name = _SCALED if spans_rows else _ALONE
    zero, end = graph.int64("zero", (0,)), graph.int64("end", (np.iinfo(np.int64).max,))
    places = graph.add("Max", graph.add("Add", counted, less_one), zero, name=_PLACES)
    last = graph.int64("last", (-1,))
    counts, last_place = (graph.add("Slice", x, last, end, axis) for x in (counted, places))
    before = graph.add("Sub", graph.add("ReduceSum", mask, axis, keepdims=1), counts)
    # Behind a cache every op takes all new tokens to count: the rows of padding come last, and are written over.
    whole = graph.add("Sub", graph.add("Add", before, new), one)
    seqlens = graph.add("Squeeze", graph.add("Where", is_first, last_place, whole), axis)
    steps = graph.add("Range", scalars[0], graph.add("Squeeze", new), scalars[1])
    # Each key is another, since readers differ on which of equal ones comes first.
    keys = graph.add("Sub", graph.add("Mul", new_mask, new), steps)
    order = graph.unused_name("TopK")
    graph.add_all("TopK", [keys, new], [f"{order}_keys", order], axis=1)
    lengths = (
        graph.add("Cast", seqlens, name="seqlens_k", to=TensorProto.INT32),
        graph.add("Cast", graph.add("Squeeze", total), name="total_sequence_length", to=TensorProto.INT32),
    )
    moved = graph.add("GatherElements", ids, order, axis=1)
    return Tokens(moved, counts, before, steps, places, last_place, lengths)


def states_read(graph: "Graph", x: str, places: str) -> str:
    """States that the head reads, [B, n, D] of x [B, T, D]: those at places [B, n]."""
    index = graph.add("Unsqueeze", places, graph.int64("channels_axis", (2,)))
    return graph.add("GatherND", x, index, name=_STATES_READ, batch_dims=1)


def give_every_position(model: ModelProto) -> bool:
    """Have the head read every position, as evaluations need it; returns whether that is a change."""
    maker = {output: node for node in model.graph.node for output in node.output}
    if _LAST_POSITION in maker:
        node = maker[_LAST_POSITION]
        node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))
    else:
        index = maker[maker[_STATES_READ].input[1]] if _STATES_READ in maker else None
        if index is None or index.input[0] == _PLACES:
            return False
        index.input[0] = _PLACES
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_param = SEQUENCE
    return True
