"""Export of gated MLPs with PolyNorm, and of mixtures of experts as a Loop over the experts that the router chose.

A weight has the matrices of all experts, or of all heads, stacked along its rows. MatMulNBits needs constant codes, so
the graph gathers and dequantizes the weight of each chosen expert.

In functions that add a block, `x` is the name of its input [B, T, D], and names of its parameters start with `prefix`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper
from torch import Tensor

from diffquant.model.motif3.blocks import ExpertsBlock, PolyMLPBlock, PolySettings
from diffquant.model.motif3.experts import SUM_EPS
from diffquant.onnx.graph.decoder import Decoder
from diffquant.onnx.graph.linears import Linears
from diffquant.onnx.graph.matrix import Matrix
from diffquant.onnx.graph.nodes import EMITTED
from diffquant.onnx.graph.op import CONTRIB


def add_head_matrices(linears: Linears, matrix: Matrix, name: str, rows: Tensor, is_transposed: bool) -> str:
    """Add an initializer with a weight's dequantized values, one matrix per head, and return its name.

    Its shape is [heads, n, in], or [heads, in, n] if `is_transposed`, with n output and `in` input channels per head.

    Args:
        matrix: weight of all heads.
        name: name of the initializer.
        rows: indices of each head's rows in the weight, int64 [heads, n].
        is_transposed: whether each head's matrix is transposed.
    """
    heads, height = rows.shape
    width = matrix.shape[1]
    own = replace(matrix, shape=(rows.numel(), width), order=rows.flatten())

    def read(first: int, last: int) -> Tensor:
        by_head: Tensor = own.read_float32(first * height, last * height).unflatten(0, (-1, height))
        return by_head.mT if is_transposed else by_head

    shape = (heads, width, height) if is_transposed else (heads, height, width)
    return linears.add_values(name, shape, matrix, read)


def add_expert_product(linears: Linears, x: str, matrix: Matrix, experts: int, number: str) -> str:
    """Add the matmul of x with one expert's transposed weight, and return the name of the output [tokens, out].

    Args:
        x: name of the input [tokens, in].
        matrix: weight [experts·out, in] of all experts.
        experts: number of experts.
        number: name of the expert's index, an int64 scalar.
    """
    graph, (height, width) = linears.graph, (matrix.shape[0] // experts, matrix.shape[1])

    def read(first: int, last: int) -> Tensor:
        return matrix.read_unquantized(first * height, last * height)

    if matrix.scheme.quantizes:
        weight = _gather_expert(linears, matrix, (height, width), number)
    else:
        values = linears.add_values(f"{matrix.module}.weight", (experts, height, width), matrix, read)
        weight = graph.add("Gather", values, number)
    return graph.add("FusedMatMul", x, weight, domain=CONTRIB, transB=1)


def _gather_expert(linears: Linears, matrix: Matrix, shape: tuple[int, int], number: str) -> str:
    """Add the gathering and dequantization of one expert's weight [out, in], and return its name."""
    graph, (out, width) = linears.graph, shape
    layout = linears.make_stored_tensors(matrix)
    scales = replace(layout["scales"], shape=(*layout["scales"].shape, 1))
    codes, scales_name = linears.add_tensor(layout["codes"]), linears.add_tensor(scales)
    first = graph.add("Mul", number, graph.constant(f"expert.height.{out}", np.array(out, np.int64)))
    rows = graph.add("Add", graph.constant(f"expert.rows.{out}", np.arange(out)), first)
    return linears.add_dequantized_rows(matrix, codes, scales_name, rows, f"expert.row.{out}.{width}", (out,))


def scale_by(decoder: Decoder, x: str, factor: float, is_float32: bool = False) -> str:
    """Multiply x by a constant, and return the product's name; if the factor is 1, return x.

    Args:
        is_float32: whether x is float32; if false, x has the activations' type.
    """
    if factor == 1.0:
        return x
    dtype = np.dtype(np.float32) if is_float32 else helper.tensor_dtype_to_np_dtype(decoder.graph.kind)
    return decoder.graph.add("Mul", x, decoder.graph.constant(f"factor.{factor:.17g}.{dtype}", np.array(factor, dtype)))


def _bounds(decoder: Decoder, poly: PolySettings) -> list[str]:
    return [decoder.graph.constant(f"clamp.{x!r}", np.array(x, np.float32)) for x in (-poly.clamp, poly.clamp)]


def add_poly_mlp(decoder: Decoder, x: str, prefix: str, block: PolyMLPBlock) -> str:
    """Add a gated MLP with PolyNorm as its activation function, and return its output's name."""
    bounds = _bounds(decoder, block.poly)
    gate, up = (
        decoder.graph.add("Clip", decoder.graph.to_float32(y), *bounds)
        for y in decoder.add_linears(x, [f"{prefix}.gate_proj", f"{prefix}.up_proj"])
    )
    weight, bias = _poly_parameters(decoder, f"{prefix}.act_fn", block.poly)
    active = EMITTED[block.activation](decoder.graph, gate, {"weight": weight, "bias": bias})
    product = decoder.graph.to_activation_type(decoder.graph.add("Mul", active, up))
    return decoder.add_linear(scale_by(decoder, product, block.poly.scale), f"{prefix}.down_proj")


def _poly_parameters(decoder: Decoder, prefix: str, poly: PolySettings) -> list[str]:
    weight, bias = (decoder.plan.read_vector(f"{prefix}.{name}") for name in ("weight", "bias"))
    if poly.sigmoid:
        weight = weight.sigmoid()
    if poly.bias_clamp is not None:
        bias = bias.clamp(-poly.bias_clamp, poly.bias_clamp)
    return [
        decoder.graph.constant(f"{prefix}.{name}", values.numpy())
        for name, values in (("weight", weight), ("bias", bias))
    ]


def add_experts(decoder: Decoder, x: str, prefix: str, block: ExpertsBlock) -> str:
    """Add a mixture of experts, and return its output's name.

    The nodes are a router, a Loop over the experts that it chose for any token, and a shared expert for all tokens.
    """
    graph = decoder.graph
    tokens = graph.add("Reshape", x, graph.int64("tokens", (-1, block.width)))
    chosen, shares = _route(decoder, tokens, prefix, block)
    parameters = _poly_parameters(decoder, f"{prefix}.experts.act_fn", block.poly)
    some = graph.unused_name("Unique")
    graph.add_with_outputs("Unique", [graph.add("Reshape", chosen, graph.int64("flat", (-1,)))], [some], sorted=1)
    count = graph.add("Squeeze", graph.add("Shape", some))
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0])
    nothing = graph.add("ConstantOfShape", graph.add("Shape", tokens), value=zero)
    # onnx's reference evaluator treats an absent condition as false.
    always = graph.add("Constant", value=helper.make_tensor("always", TensorProto.BOOL, [], [True]))
    given = [graph.unused_name(name) for name in ("round", "goes", "sum")]
    with graph.collect_nodes() as nodes:
        number = graph.add("Gather", some, given[0])
        total = _with_expert(decoder, given[2], number, tokens, chosen, shares, parameters, prefix, block)
        goes_on = graph.add("Identity", given[1])
    kinds: list[tuple[int, list[int] | None]] = [
        (TensorProto.INT64, []),
        (TensorProto.BOOL, []),
        (TensorProto.FLOAT, None),
    ]
    inputs = [helper.make_tensor_value_info(n, *kind) for n, kind in zip(given, kinds, strict=True)]
    outputs = [helper.make_tensor_value_info(n, *kind) for n, kind in zip((goes_on, total), kinds[1:], strict=True)]
    body = helper.make_graph(nodes, f"{prefix}.expert", inputs, outputs)
    routed = graph.to_activation_type(graph.add("Loop", count, always, nothing, body=body))
    by_token = graph.add("Reshape", routed, graph.add("Shape", x))
    return graph.add("Add", by_token, add_poly_mlp(decoder, x, f"{prefix}.shared_experts", block.shared))


def _route(decoder: Decoder, tokens: str, prefix: str, block: ExpertsBlock) -> tuple[str, str]:
    """Add the router; return the names of each token's expert indices, int64 [N, chosen], and float32 weights."""
    graph, plan = decoder.graph, decoder.plan
    name = f"{prefix}.router.gate.weight"
    weight = graph.constant(name, plan.read_small_matrix(name).T.contiguous().numpy())
    scores = graph.add("Sigmoid", graph.add("MatMul", graph.to_float32(tokens), weight))
    favoured = scores
    if block.biased:
        bias = graph.constant(f"{prefix}.expert_bias", plan.read_vector(f"{prefix}.expert_bias").numpy())
        favoured = graph.add("Add", scores, bias)
    chosen = graph.unused_name("TopK_indices")
    graph.add_with_outputs(
        "TopK", [favoured, graph.int64("chosen", (block.chosen,))], [graph.unused_name("TopK"), chosen]
    )
    shares = graph.add("GatherElements", scores, chosen, axis=1)
    if block.normed:
        sums = graph.add("ReduceSum", shares, graph.int64("second_axis", (1,)))
        least = graph.constant("smallest_share", np.array(SUM_EPS, np.float32))
        shares = graph.add("Div", shares, graph.add("Add", sums, least))
    return chosen, scale_by(decoder, shares, block.scale, is_float32=True)


def _with_expert(
    decoder: Decoder,
    total: str,
    number: str,
    tokens: str,
    chosen: str,
    shares: str,
    parameters: Sequence[str],
    prefix: str,
    block: ExpertsBlock,
) -> str:
    """Add one expert's weighted output for its tokens to the sum `total` [N, D], and return the new sum's name."""
    graph, poly = decoder.graph, block.poly
    first = graph.int64("zero", (0,))
    places = graph.add("NonZero", graph.add("Equal", chosen, number))
    rows = graph.add("Squeeze", graph.add("Gather", places, first), first)
    share = graph.add("GatherND", shares, graph.add("Transpose", places, perm=[1, 0]))
    own = graph.add("Gather", tokens, rows)
    up_matrix, down_matrix = (
        decoder.plan.matrices[f"{prefix}.experts.{name}"] for name in ("gate_up_proj", "down_proj")
    )
    both = graph.to_float32(add_expert_product(decoder.linears, own, up_matrix, block.experts, number))
    gate, up = graph.split(both, [block.inner, block.inner])
    weight, bias = (graph.add("Gather", name, number) for name in parameters)
    active = EMITTED["poly_norm"](graph, gate, {"weight": weight, "bias": bias})
    product = graph.to_activation_type(graph.add("Clip", graph.add("Mul", active, up), *_bounds(decoder, poly)))
    y = add_expert_product(decoder.linears, scale_by(decoder, product, poly.scale), down_matrix, block.experts, number)
    column = graph.int64("second_axis", (1,))
    shared = graph.add("Mul", graph.to_float32(y), graph.add("Unsqueeze", share, column))
    return graph.add("ScatterND", total, graph.add("Unsqueeze", rows, column), shared, reduction="add")
