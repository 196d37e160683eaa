"""Matrices in an exported graph, of which several may stand in one initializer."""

from onnx import ModelProto, TensorProto, numpy_helper


def rows_of(model: ModelProto, name: str) -> tuple[TensorProto, slice]:
    """The initializer that has a matrix's codes or scales, or another tensor, and the rows that are its own.

    Args:
        name: name that it has by itself, such as "model.layers.0.mlp.up_proj.weight_codes".
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    if name in initializers:
        return initializers[name], slice(None)
    module = name.rpartition(".")[0]
    split = next(node for node in model.graph.node if f"{module}.product" in node.output)
    product = next(node for node in model.graph.node if split.input[0] in node.output)
    stack = next(each for each in product.input if each.endswith(name.removeprefix(module)))
    heights = numpy_helper.to_array(initializers[split.input[1]]).tolist()
    place = list(split.output).index(f"{module}.product")
    first = sum(heights[:place])
    return initializers[stack], slice(first, first + heights[place])
