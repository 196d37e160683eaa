"""Writes a model's functions out, for readers that know none."""

from onnx import ModelProto, inliner


def inlined(model: ModelProto) -> ModelProto:
    """The model with the nodes of each function in the place of its calls, and no domain that it does not use."""
    written_out = inliner.inline_local_functions(model)
    used = {node.domain for node in written_out.graph.node}
    kept = [each for each in written_out.opset_import if each.domain in used]
    del written_out.opset_import[:]
    written_out.opset_import.extend(kept)
    return written_out
