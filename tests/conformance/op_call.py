"""Calls of the op on random inputs, and a model of one node that makes such a call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from diffquant.onnx.graph.body import BodyKind, make_function_body
from diffquant.onnx.graph.op import CONTRIB, DOMAIN, GATES, NAME, VERSION, AttentionAttributes
from diffquant.onnx.options import DEFAULT_OPSET, IR_VERSION
from tests.conformance.schemas import schema

OUTPUTS = ("output", "present_key", "present_value")


@dataclass(frozen=True)
class Vector:
    """A call and the outputs that it must give.

    Attributes:
        name: name of the vector, which says what it is about.
        attributes: attributes of the node.
        inputs: inputs of the call by name, without absent ones.
        outputs: outputs by name.
    """

    name: str
    attributes: AttentionAttributes
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]

    @property
    def width(self) -> int:
        """Width d of a query's head."""
        return int(self.inputs["query"].shape[2]) // self.attributes.query_heads

    @property
    def is_cached(self) -> bool:
        """Whether the call has a past."""
        return "past_key" in self.inputs


@dataclass(frozen=True)
class Made:
    """A vector to make.

    Attributes:
        attributes: attributes that differ from `AttentionAttributes` of four pairs over two KV pairs in generation 1.
        lengths: number of tokens of each sequence after the call.
        new: number T of new tokens; all of the longest sequence by default, which is a first call.
        past: number P of rows of the past; absent where it is None.
        per_token: whether λ is given for each token and pair.
        gates: gates by name, each "scalar" or "each".
        half: whether activations are float16.
    """

    attributes: Mapping[str, Any]
    lengths: tuple[int, ...] = (5,)
    new: int | None = None
    past: int | None = None
    per_token: bool = False
    gates: Mapping[str, str] | None = None
    half: bool = False

    @property
    def generation(self) -> int:
        return int(self.attributes.get("generation", 1))

    @property
    def width(self) -> int:
        """Width d of a query's head: GroupQueryAttention takes key rows of 8 channels, and of 16 to rotate them."""
        row = 16 if self.attributes.get("do_rotary") else 8
        return row // 2 if self.generation == 1 else row


def random_inputs(
    attributes: AttentionAttributes, made: Made, width: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random inputs of heads d wide, in steps of 1/64, which are short to write and exact in every type."""
    h, h_kv = attributes.num_pairs, attributes.num_kv_pairs
    row = width * (2 if attributes.generation == 1 else 1)
    batch, total = len(made.lengths), max(made.lengths)
    tokens = made.new or total
    kind = np.float16 if made.half else np.float32

    def normal(*shape: int) -> np.ndarray:
        return (np.round(rng.standard_normal(shape) * 64) / 64).astype(kind)

    def share(*shape: int) -> np.ndarray:
        return (rng.integers(8, 120, shape) / 64).astype(np.float32)

    each = (batch, tokens, h)
    inputs = {
        "query": normal(batch, tokens, attributes.query_heads * width) * kind(2),
        "key": normal(batch, tokens, h_kv * row),
        "value": normal(batch, tokens, h_kv * row),
        "lambda": share(*each) if made.per_token else share(1),
        "seqlens_k": np.array(made.lengths, np.int32) - 1,
        "total_sequence_length": np.array(total, np.int32),
    }
    if made.past is not None:
        shape = (batch, h_kv, made.past, row)
        for part in ("past_key", "past_value"):
            inputs[part] = _past(shape, attributes.kv_bit_width, rng) if attributes.kv_bit_width else normal(*shape)
    if attributes.do_rotary:
        angles = np.arange(total)[:, None] / 10.0 ** (np.arange(0, width, 2) / width)
        tables = np.tile(angles, (1, row // width))
        inputs |= {"cos_cache": np.cos(tables).astype(kind), "sin_cache": np.sin(tables).astype(kind)}
    if attributes.kv_bit_width:
        top = 3.0 / 2 ** (attributes.kv_bit_width - 1)
        for part in ("k_scale", "v_scale"):
            inputs[part] = (top * (0.5 + rng.random((1, h_kv, 1, row)))).astype(np.float32)
    for gate, form in (made.gates or {}).items():
        whole = normal(batch, tokens, h * row)
        inputs[gate] = whole if gate == "output_gate" else share(*(each if form == "each" else (1,)))
    return inputs


def one_node(vector: Vector, kind: BodyKind | None) -> onnx.ModelProto:
    """ONNX model of one node; `kind` is that of its function body, None for none."""
    attributes, given = vector.attributes, vector.inputs
    gates = [gate for gate in GATES if gate in given]
    inputs = [_declared(name, value) for name, value in given.items()]
    outputs = [_declared(name, vector.outputs[name]) for name in OUTPUTS]
    names = [p.name if p.name in given else "" for p in schema().inputs]
    node = helper.make_node(NAME, names, list(OUTPUTS), domain=DOMAIN, **attributes.to_dict())
    functions = (
        [make_function_body(kind, attributes, vector.width, DEFAULT_OPSET, vector.is_cached, gates)] if kind else []
    )
    domains = {"": DEFAULT_OPSET, DOMAIN: VERSION} | ({CONTRIB: 1} if kind == "contrib" else {})
    return helper.make_model(
        helper.make_graph([node], "vector", inputs, outputs),
        opset_imports=[helper.make_opsetid(*domain) for domain in domains.items()],
        functions=functions,
        ir_version=IR_VERSION,
    )


def _past(shape: tuple[int, ...], bits: int, rng: np.random.Generator) -> np.ndarray:
    """A past of random codes."""
    stored = (*shape[:-1], shape[-1] * bits // 8)
    codes = rng.integers(0, 256, stored, np.uint8)
    return codes.view(np.int8) if bits == 8 else codes


def _declared(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
