"""Writes a model's functions out, for readers that know none."""

from onnx import ModelProto, inliner

# onnx's own op for attention with any function of the logits, and its domain.
PREVIEW, FLEX_ATTENTION = "ai.onnx.preview", "FlexAttention"
_FLEX = (PREVIEW, FLEX_ATTENTION)


def inlined(model: ModelProto) -> ModelProto:
    """The model with the nodes of each function in the place of its calls, and no domain that it does not use."""
    written_out = inliner.inline_local_functions(model)
    return _trimmed(written_out)


def is_flex(model: ModelProto) -> bool:
    """Whether the graph has nodes that ONNX Runtime lacks, which stand for a function of standard operators."""
    return any((node.domain, node.op_type) == _FLEX for node in model.graph.node)


def without_flex(model: ModelProto) -> ModelProto:
    """The model with each FlexAttention written out as onnx defines it."""
    return _trimmed(inliner.inline_selected_functions(model, [_FLEX], exclude=False, inline_schema_functions=True))


def _trimmed(written_out: ModelProto) -> ModelProto:
    used = {node.domain for node in written_out.graph.node}
    kept = [each for each in written_out.opset_import if each.domain in used]
    del written_out.opset_import[:]
    written_out.opset_import.extend(kept)
    return written_out
