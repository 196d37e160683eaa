"""A toy mixture of experts in exports: the third and last file that such a model takes."""

import numpy as np
from onnx import TensorProto

from diffquant.onnx.architectures.experts import add_expert_product
from diffquant.onnx.graph.decoder import Decoder
from diffquant.onnx.graph.nodes import EMITTED
from tests.support.mixture_adapter import ExpertsBlock


def mixture(decoder: Decoder, x: str, place: str, block: ExpertsBlock) -> str:
    """Add every expert on every token, weighted by its share, which is 0 of those that were not chosen."""
    graph, plan = decoder.graph, decoder.plan
    tokens = graph.add("Reshape", x, graph.int64("tokens", (-1, block.width)))
    gate = graph.constant(f"{place}.gate", plan.read_small_matrix(f"{place}.gate.weight").T.contiguous().numpy())
    scores = graph.add("Softmax", graph.add("MatMul", graph.to_float32(tokens), gate), axis=-1)
    best, chosen = graph.unused_name("TopK"), graph.unused_name("TopK")
    graph.add_with_outputs("TopK", [scores, graph.int64("chosen", (block.chosen,))], [best, chosen])
    shares = graph.add("Div", best, graph.add("ReduceSum", best, graph.int64("last_axis", (-1,))))
    total = ""
    for expert in range(block.experts):
        number = graph.constant(f"expert.{expert}", np.array(expert, np.int64))
        is_own = graph.add("Cast", graph.add("Equal", chosen, number), to=TensorProto.FLOAT)
        share = graph.add("ReduceSum", graph.add("Mul", shares, is_own), graph.int64("last_axis", (-1,)))
        up, down = (plan.matrices[f"{place}.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        halves = graph.split(add_expert_product(decoder.linears, tokens, up, block.experts, number), [block.inner] * 2)
        active = EMITTED["silu"](graph, halves[0], {})
        y = add_expert_product(decoder.linears, graph.add("Mul", active, halves[1]), down, block.experts, number)
        weighted = graph.add("Mul", y, graph.to_activation_type(share))
        total = graph.add("Add", total, weighted) if total else weighted
    return graph.add("Reshape", total, graph.add("Shape", x))
