"""Gated networks with PolyNorm in a graph: a layer's own, and experts in a Loop over those that some token chose."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from onnx import TensorProto, helper

from diffquant.export.graph.activations import EMITTED
from diffquant.export.graph.decoder import Decoder
from diffquant.export.graph.stacks import expert_product
from diffquant.model.blocks import Block
from diffquant.model.motif3.blocks import ExpertsBlock, PolyMLPBlock, PolySettings
from diffquant.model.motif3.experts import SUM_EPS


class ExpertsDecoder(Decoder):
    """Layers whose network is such a one."""

    def _expanded(self, x: str, prefix: str, block: Block) -> str:
        """Name of the network's output [B, T, D]."""
        if isinstance(block, ExpertsBlock):
            return self._experts(x, prefix, block)
        return self._poly_mlp(x, prefix, cast(PolyMLPBlock, block))

    def _times(self, x: str, factor: float, is_wide: bool = False) -> str:
        """Name of x times a factor; x is of the activations' type, or float32."""
        if factor == 1.0:
            return x
        dtype = np.dtype(np.float32) if is_wide else helper.tensor_dtype_to_np_dtype(self.graph.kind)
        return self.graph.add("Mul", x, self.graph.constant(f"factor.{factor:.17g}.{dtype}", np.array(factor, dtype)))

    def _bounds(self, poly: PolySettings) -> list[str]:
        return [self.graph.constant(f"clamp.{x!r}", np.array(x, np.float32)) for x in (-poly.clamp, poly.clamp)]

    def _poly_mlp(self, x: str, prefix: str, block: PolyMLPBlock) -> str:
        bounds = self._bounds(block.poly)
        gate, up = (
            self.graph.add("Clip", self.graph.wide(y), *bounds)
            for y in self._linears(x, [f"{prefix}gate_proj", f"{prefix}up_proj"])
        )
        weight, bias = self._poly_parameters(f"{prefix}act_fn.", block.poly)
        active = EMITTED[block.activation](self.graph, gate, {"weight": weight, "bias": bias})
        product = self.graph.narrow(self.graph.add("Mul", active, up))
        return self._linear(self._times(product, block.poly.scale), f"{prefix}down_proj")

    def _poly_parameters(self, prefix: str, poly: PolySettings) -> list[str]:
        weight, bias = (self.plan.vector(f"{prefix}{name}") for name in ("weight", "bias"))
        if poly.sigmoid:
            weight = weight.sigmoid()
        if poly.bias_clamp is not None:
            bias = bias.clamp(-poly.bias_clamp, poly.bias_clamp)
        return [
            self.graph.constant(f"{prefix}{name}", values.numpy())
            for name, values in (("weight", weight), ("bias", bias))
        ]

    def _experts(self, x: str, prefix: str, block: ExpertsBlock) -> str:
        graph = self.graph
        tokens = graph.add("Reshape", x, graph.int64("tokens", (-1, block.width)))
        chosen, shares = self._routed(tokens, prefix, block)
        parameters = self._poly_parameters(f"{prefix}experts.act_fn.", block.poly)
        some = graph.unused_name("Unique")
        graph.add_all("Unique", [graph.add("Reshape", chosen, graph.int64("flat", (-1,)))], [some], sorted=1)
        count = graph.add("Squeeze", graph.add("Shape", some))
        zero = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0])
        nothing = graph.add("ConstantOfShape", graph.add("Shape", tokens), value=zero)
        # onnx's evaluator takes an absent condition for one that fails.
        always = graph.add("Constant", value=helper.make_tensor("always", TensorProto.BOOL, [], [True]))
        given = [graph.unused_name(name) for name in ("round", "goes", "sum")]
        with graph.nested() as nodes:
            number = graph.add("Gather", some, given[0])
            total = self._with_expert(given[2], number, tokens, chosen, shares, parameters, prefix, block)
            goes_on = graph.add("Identity", given[1])
        kinds: list[tuple[int, list[int] | None]] = [
            (TensorProto.INT64, []),
            (TensorProto.BOOL, []),
            (TensorProto.FLOAT, None),
        ]
        inputs = [helper.make_tensor_value_info(n, *kind) for n, kind in zip(given, kinds, strict=True)]
        outputs = [helper.make_tensor_value_info(n, *kind) for n, kind in zip((goes_on, total), kinds[1:], strict=True)]
        body = helper.make_graph(nodes, f"{prefix}expert", inputs, outputs)
        routed = self.graph.narrow(graph.add("Loop", count, always, nothing, body=body))
        by_token = graph.add("Reshape", routed, graph.add("Shape", x))
        return graph.add("Add", by_token, self._poly_mlp(x, f"{prefix}shared_experts.", block.shared))

    def _routed(self, tokens: str, prefix: str, block: ExpertsBlock) -> tuple[str, str]:
        """Names of the numbers of each token's experts, int64 [N, chosen], and of their shares in float32."""
        graph, plan = self.graph, self.plan
        name = f"{prefix}router.gate.weight"
        weight = graph.constant(name, plan.small_matrix(name).T.contiguous().numpy())
        scores = graph.add("Sigmoid", graph.add("MatMul", self.graph.wide(tokens), weight))
        favoured = scores
        if block.biased:
            bias = graph.constant(f"{prefix}expert_bias", plan.vector(f"{prefix}expert_bias").numpy())
            favoured = graph.add("Add", scores, bias)
        chosen = graph.unused_name("TopK_indices")
        graph.add_all("TopK", [favoured, graph.int64("chosen", (block.chosen,))], [graph.unused_name("TopK"), chosen])
        shares = graph.add("GatherElements", scores, chosen, axis=1)
        if block.normed:
            sums = graph.add("ReduceSum", shares, graph.int64("second_axis", (1,)))
            least = graph.constant("smallest_share", np.array(SUM_EPS, np.float32))
            shares = graph.add("Div", shares, graph.add("Add", sums, least))
        return chosen, self._times(shares, block.scale, is_wide=True)

    def _with_expert(
        self,
        total: str,
        number: str,
        tokens: str,
        chosen: str,
        shares: str,
        parameters: Sequence[str],
        prefix: str,
        block: ExpertsBlock,
    ) -> str:
        """Name of the sum [N, D] with what an expert makes of its tokens."""
        graph, poly = self.graph, block.poly
        first = graph.int64("zero", (0,))
        places = graph.add("NonZero", graph.add("Equal", chosen, number))
        rows = graph.add("Squeeze", graph.add("Gather", places, first), first)
        share = graph.add("GatherND", shares, graph.add("Transpose", places, perm=[1, 0]))
        own = graph.add("Gather", tokens, rows)
        up_matrix, down_matrix = (
            self.plan.matrices[f"{prefix}experts.{name}"] for name in ("gate_up_proj", "down_proj")
        )
        both = self.graph.wide(expert_product(self.linears, own, up_matrix, block.experts, number))
        gate, up = self.graph.split(both, [block.inner, block.inner])
        weight, bias = (graph.add("Gather", name, number) for name in parameters)
        active = EMITTED["poly_norm"](graph, gate, {"weight": weight, "bias": bias})
        product = graph.narrow(graph.add("Clip", graph.add("Mul", active, up), *self._bounds(poly)))
        y = expert_product(self.linears, self._times(product, poly.scale), down_matrix, block.experts, number)
        column = graph.int64("second_axis", (1,))
        shared = graph.add("Mul", self.graph.wide(y), graph.add("Unsqueeze", share, column))
        return graph.add("ScatterND", total, graph.add("Unsqueeze", rows, column), shared, reduction="add")
