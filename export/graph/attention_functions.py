"""The function that a graph's attention nodes call."""

from collections.abc import Sequence
from dataclasses import replace

from onnx import FunctionProto, NodeProto

from diffquant.export.graph.body import BodyKind, body, contrib_problems
from diffquant.export.graph.op import DOMAIN, GATES, NAME, OpAttributes
from diffquant.export.graph.plan import ExportPlan


def attention_function(plan: ExportPlan, nodes: Sequence[NodeProto], attributes: OpAttributes) -> FunctionProto:
    """The op's body, which serves every attention node.

    Args:
        nodes: all nodes of the graph.
        attributes: what all attention nodes have but for their windows.
    """
    attentions = [node for node in nodes if (node.domain, node.op_type) == (DOMAIN, NAME)]
    windows = sorted({window for node in attentions if (window := _window(node)) > 0})
    return _function(plan, replace(attributes, local_window_size=max(windows, default=-1)))


def _function(plan: ExportPlan, attributes: OpAttributes) -> FunctionProto:
    spec, options = plan.spec, plan.options
    # Where GroupQueryAttention cannot compute it (rounded logits, odd widths), the body spells it out.
    kind: BodyKind = "pure" if contrib_problems(attributes, spec.head_dim) else "contrib"
    present = {"signal_gate": spec.lam == "two-gates", "output_gate": spec.output_gate}
    gates = [name for name in GATES if present[name]]
    return body(kind, attributes, spec.head_dim, options.opset, options.cache, gates)


def _window(node: NodeProto) -> int:
    """The window of an attention node, -1 for none."""
    window: int = next(each.i for each in node.attribute if each.name == "local_window_size")
    return window
