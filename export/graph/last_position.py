"""The state that the head reads: each sequence's last in a model that generates, or that of every position."""

from typing import TYPE_CHECKING

from onnx import ModelProto, helper

# Who runs an exported folder changes its graph without torch.
if TYPE_CHECKING:
    from diffquant.export.graph.nodes import Graph

SEQUENCE = "sequence"
_LAST_POSITION = "last_position"


def last_position(graph: "Graph", x: str, ids: str, last_token: str) -> str:
    """States [B, 1, D] of each sequence's last token, of x [B, T, D]: to its right there may be padding.

    Args:
        ids: name of the token ids [B, T].
        last_token: name of each sequence's number of tokens, less one, [B].
    """
    end = graph.add("Sub", graph.add("Shape", ids, start=1, end=2), graph.int64("one", (1,)))
    # Only a first call has padding, and there a token's number is its place; behind a cache it is larger.
    place = graph.add("Min", last_token, end)
    index = graph.add("Unsqueeze", place, graph.int64("place_axes", (1, 2)))
    return graph.add("GatherND", x, index, name=_LAST_POSITION, batch_dims=1)


def give_every_position(model: ModelProto) -> bool:
    """Have the head read every position, as evaluations need it; returns whether that is a change."""
    node = next((node for node in model.graph.node if _LAST_POSITION in node.output), None)
    if node is None:
        return False
    node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_param = SEQUENCE
    return True
