"""Whether the nodes of a graph say what their function bodies compute: a machine runs the one or the other.

With the native library a node's attributes count; without it its body, in which most of them are written as numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper

from diffquant.errors import UsageError
from diffquant.export.graph.body import BodyKind, body
from diffquant.export.graph.matmul import MATMUL, matmul_function
from diffquant.export.graph.op import CONTRIB, DOMAIN, GATES, NAME, OpAttributes, schema
from diffquant.export.graph.quantized_attention import QUANTIZED_ATTENTION, quantized_attention_function

# The ops that have kernels, and whose nodes have attributes.
_OPS = (NAME, QUANTIZED_ATTENTION, MATMUL)
_INPUTS = [each.name for each in schema().inputs]


def body_problems(model: ModelProto, width: int) -> list[str]:
    """Differences between bodies and those that the attributes of their nodes make, as sentences.

    Args:
        width: d, width of a query.
    """
    bodies = {(each.domain, each.name): each for each in model.functions}
    nodes = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in _OPS]
    windows = [attributes.get("local_window_size", -1) for attributes in map(_attributes, nodes)]
    widest = max((window for window in windows if isinstance(window, int)), default=-1)
    return [problem for node in nodes for problem in _problems(node, bodies.get((DOMAIN, node.op_type)), width, widest)]


def _problems(node: NodeProto, found: FunctionProto | None, width: int, widest: int) -> Iterator[str]:
    if found is None:
        yield f"{node.name}: the file has no body of {node.op_type}, and computes nothing without the native library"
        return
    try:
        made = _made(node, found, width, widest)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        yield f"{node.name}: its attributes make no {node.op_type} ({error})"
        return
    if made.SerializeToString(deterministic=True) != found.SerializeToString(deterministic=True):
        yield f"{node.name}: {_first_difference(made, found)}"


def _made(node: NodeProto, found: FunctionProto, width: int, widest: int) -> FunctionProto:
    """The body that a node's attributes make, of the kind of the one that was found."""
    attributes, versions = _attributes(node), {each.domain: each.version for each in found.opset_import}
    opset = versions.get("", 0)
    if node.op_type == MATMUL:
        return matmul_function(opset)
    if node.op_type == QUANTIZED_ATTENTION:
        return quantized_attention_function(opset, attributes["kv_bit_width"], bool(attributes["do_rotary"]))
    given = {name for name, value in zip(_INPUTS, node.input, strict=False) if value}
    # Layers differ in their windows, and share a body that is made for the widest.
    of_all = replace(OpAttributes(**attributes), local_window_size=widest)
    kind: BodyKind = "contrib" if CONTRIB in versions else "pure"
    return body(kind, of_all, width, opset, "past_key" in given, [gate for gate in GATES if gate in given])


def _attributes(node: NodeProto) -> dict[str, Any]:
    values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    return {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()
    }


def _first_difference(made: FunctionProto, found: FunctionProto) -> str:
    """Where a body first departs from the one that a node's attributes make."""
    for wanted, given in zip(made.node, found.node, strict=False):
        if wanted == given:
            continue
        pairs = [{each.name: each for each in node.attribute} for node in (wanted, given)]
        for name in sorted({*pairs[0], *pairs[1]}):
            a, b = (_text(each.get(name)) for each in pairs)
            if a != b:
                return f"by its attributes {given.op_type}'s {name} is {a}, and in the function body {b}"
        return f"its attributes make another function body, from {', '.join(wanted.output)} on"
    return "its attributes make another function body than the file has"


def _text(attribute: AttributeProto | None) -> str:
    if attribute is None:
        return "absent"
    return " ".join(str(helper.printable_attribute(attribute)).split())[:120]
