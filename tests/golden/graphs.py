"""Each family's exported graph as text, by which a reviewer sees what a change of the exporter changes; no weights."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from diffquant.onnx.files import model_file
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_to

# As many as it takes to have each kind.
_LAYERS = {"phi4flash": 8, "motif3": 2}
KEPT = Path(__file__).parent / "graphs"
_ALL = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}
# A source and the options of its export.
_PLAIN = ("diffllama", "unilm-v1", "motif", "motif-grouped", "gated", "phi4flash", "motif3")
GRAPHS = {name: (name, {}) for name in _PLAIN} | {
    "diffllama-quantized": ("diffllama", _ALL),
    "diffllama-portable": ("diffllama", {"portable": True}),
    "unilm-v2-logits": ("unilm-v2", {"logits": "8:tensor", **_ALL}),
    "gated-web": ("gated", {"web": True}),
    "phi4flash-quantized": ("phi4flash", _ALL),
    "motif3-quantized": ("motif3", {"weights": "4:row", "kv_bits": 8}),
    "transformer": ("llama", {}),
    "transformer-8-bit-cache": ("llama", {"kv_bits": 8}),
}


def graph_text(folder: Path, name: str) -> str:
    """The graph of one of `GRAPHS`, exported into a folder."""
    source, options = GRAPHS[name]
    checkpoint = write_checkpoint(folder / "checkpoint", source, num_hidden_layers=_LAYERS.get(source, 1))
    model = onnx.load(model_file(export_to(folder / "out", checkpoint, **options)), load_external_data=False)
    imports = ", ".join(f"{each.domain or 'ai.onnx'} {each.version}" for each in model.opset_import)
    lines = [f"opsets: {imports}; IR {model.ir_version}"]
    lines += [f"input {_value(each)}" for each in model.graph.input]
    lines += [f"output {_value(each)}" for each in model.graph.output]
    lines += [f"tensor {_tensor(each)}" for each in model.graph.initializer]
    lines += [_node(each) for each in model.graph.node]
    for function in model.functions:
        lines += ["", f"function {function.domain}::{function.name} <{', '.join(function.attribute)}>"]
        lines += [f"  ({', '.join(function.input)}) -> ({', '.join(function.output)})"]
        lines += [f"  {_node(each)}" for each in function.node]
    return "\n".join(lines) + "\n"


def _value(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sizes = [dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim]
    return f"{value.name} {TensorProto.DataType.Name(kind.elem_type).lower()}[{', '.join(sizes)}]"


def _tensor(tensor: TensorProto) -> str:
    return f"{tensor.name} {TensorProto.DataType.Name(tensor.data_type).lower()}{list(tensor.dims)}"


def _node(node: onnx.NodeProto) -> str:
    domain = f"{node.domain}::" if node.domain else ""
    attributes = ", ".join(f"{each.name}={_attribute(each)}" for each in node.attribute)
    told = f" <{attributes}>" if attributes else ""
    return f"{', '.join(node.output)} = {domain}{node.op_type}({', '.join(node.input)}){told}"


def _attribute(attribute: onnx.AttributeProto) -> str:
    if attribute.ref_attr_name:
        return f"@{attribute.ref_attr_name}"
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return str(onnx.numpy_helper.to_array(value).tolist())
    if isinstance(value, onnx.GraphProto):
        return "{" + "; ".join(_node(each) for each in value.node) + "}"
    return value.decode() if isinstance(value, bytes) else f"{value:g}" if isinstance(value, float) else str(value)
