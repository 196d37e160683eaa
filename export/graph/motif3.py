"""Motif-3 as an ONNX graph: the op over latents, experts in a Loop over those that tokens chose, residual streams.

What goes from layer to layer is the streams of a token one behind another, [B, T, E·D].
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from onnx import FunctionProto, TensorProto

from diffquant.export.graph.cache_scales import Scales
from diffquant.export.graph.decoder import EMBEDDED, LAYER_OUTPUT, PRESENT
from diffquant.export.graph.experts import ExpertsDecoder
from diffquant.export.graph.latents import EXPANSION, OUTPUT_GATE
from diffquant.export.graph.op import DOMAIN, NAME, OpAttributes
from diffquant.export.graph.plan import EMBEDDING, ExportPlan
from diffquant.export.graph.stacks import head_matrices
from diffquant.export.graph.streams import READ_STREAMS, read_streams_function
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.motif3.blocks import LatentAttentionBlock, StreamsBlock


class Motif3Decoder(ExpertsDecoder):
    """Layers of latent attention and experts between residual streams."""

    def __init__(self, plan: ExportPlan, scales: Mapping[int, Scales]) -> None:
        super().__init__(plan, scales)
        self.architecture = cast(Motif3Architecture, plan.source.architecture)
        self._angles: dict[tuple[float, ...], list[str]] = {}

    def _own_functions(self) -> list[FunctionProto]:
        own = self.architecture
        return [read_streams_function(own.mhc_expansion_rate, own.mhc_sinkhorn_iters, self.options.opset)]

    def _attributes(self, window: int | None = None) -> OpAttributes:
        # Of the model's own queries, which are narrower than those over latents.
        return replace(super()._attributes(window), scale=self.architecture.diff_spec.scale)

    def _embedded(self, ids: str) -> str:
        rows = self.linears.lookup(ids, self.plan.matrices[EMBEDDING], "token_rows")
        return self.graph.add("Concat", *[rows] * self.architecture.mhc_expansion_rate, axis=-1, name=EMBEDDED)

    def _layer(self, x: str, layer: int) -> str:
        prefix, eps = f"model.layers.{layer}.", self.config.rms_norm_eps
        blocks = self.architecture.layers[layer]
        read, mixed, writes = self._read(x, f"{prefix}mhc_attn.", cast(StreamsBlock, blocks["mhc_attn"]))
        normed = self._norm(read, f"{prefix}input_layernorm.weight", eps)
        attended = self._latent_attention(normed, cast(LatentAttentionBlock, blocks["self_attn"]))
        x = self._written(mixed, attended, writes)
        read, mixed, writes = self._read(x, f"{prefix}mhc_ffn.", cast(StreamsBlock, blocks["mhc_ffn"]))
        normed = self._norm(read, f"{prefix}post_attention_layernorm.weight", eps)
        name = "moe" if "moe" in blocks else "mlp"
        expanded = self._expanded(normed, f"{prefix}{name}.", blocks[name])
        return self._written(mixed, expanded, writes, LAYER_OUTPUT.format(layer=layer))

    def _final_norm(self, x: str) -> str:
        graph, own = self.graph, self.architecture
        by_stream = graph.int64("by_stream", (0, 0, own.mhc_expansion_rate, own.hidden_size))
        streams = self.graph.wide(graph.add("Reshape", x, by_stream))
        mean = graph.add("ReduceMean", streams, graph.int64("streams_axis", (2,)), keepdims=0)
        return super()._final_norm(self.graph.narrow(mean))

    def _read(self, x: str, prefix: str, block: StreamsBlock) -> tuple[str, str, str]:
        """Names of a part's input [B, T, D], the mixed streams [B, T, E, D] and the output's factors [B, T, E, 1]."""
        graph, plan = self.graph, self.plan
        heights = {gate: int(np.prod(shape)) for gate, shape in block.gates.items()}
        parts = {
            "projection": torch.cat([plan.small_matrix(f"{prefix}proj_{gate}.weight") for gate in heights]).T,
            "alpha": torch.cat([plan.vector(f"{prefix}alpha_{gate}").expand(n) for gate, n in heights.items()]),
            "bias": torch.cat([plan.vector(f"{prefix}bias_{gate}").flatten() for gate in heights]),
        }
        inputs = [graph.constant(f"{prefix}{name}", values.contiguous().numpy()) for name, values in parts.items()]
        weight = graph.constant(f"{prefix}weight", plan.vector(f"{prefix}rms_norm.weight").numpy())
        names = [f"{prefix}{name}" for name in ("read", "mixed", "writes")]
        graph.add_all(READ_STREAMS, [x, weight, *inputs], names, DOMAIN)
        read, mixed, writes = names
        return read, mixed, self._times(writes, block.post_scale, is_wide=True)

    def _written(self, mixed: str, y: str, writes: str, name: str | None = None) -> str:
        graph = self.graph
        row = graph.add("Unsqueeze", self.graph.wide(y), graph.int64("streams_axis", (2,)))
        streams = self.graph.narrow(graph.add("Add", mixed, graph.add("Mul", writes, row)))
        return graph.add("Reshape", streams, graph.int64("one_behind_another", (0, 0, -1)), name=name)

    def _latent_attention(self, x: str, block: LatentAttentionBlock) -> str:
        graph, layer, spec = self.graph, block.layer, block.spec
        prefix = f"model.layers.{layer}.self_attn."
        of_query, kept = self._linears(x, [f"{prefix}wq_a", f"{prefix}wkv_a"])
        query_latent = self._norm(of_query, f"{prefix}q_norm.weight", block.eps)
        raw, turning = self.graph.split(kept, [block.latent, block.rope])
        latent = self._norm(raw, f"{prefix}kv_norm.weight", block.eps)
        by_head = graph.int64("one_head", (0, 0, 1, block.rope))
        by_token = graph.int64("one_behind_another", (0, 0, -1))
        turned = graph.add("Reshape", self._turned(graph.add("Reshape", turning, by_head), block), by_token)
        key = graph.add("Concat", latent, turned, axis=-1)
        value = graph.add("Pad", latent, graph.int64("behind_a_latent", (0, 0, 0, 0, 0, block.rope)))
        signal_gate, lam = self._signal_gate_and_lam(x, layer)
        present = [PRESENT.format(layer=layer, part=part) for part in ("key", "value")]
        inputs = [self._queries(query_latent, prefix, block), key, value, lam, *self._past(layer)]
        inputs += [*self.tokens.lengths, "", ""]
        inputs += [*(self._cache_scales(layer) or ["", ""]), signal_gate, ""]
        attended = f"layers.{layer}.attention"
        graph.add_all(NAME, inputs, [attended, *present], DOMAIN, **self._attributes(block.window).to_dict())
        self._declare_present(present)
        rows = graph.int64("pairs_by_group", (0, 0, spec.kv_pairs, -1, block.latent + block.rope))
        bounds = [graph.int64(f"channel.{place}", (place,)) for place in (0, block.latent, -1)]
        of_latents = graph.add("Slice", graph.add("Reshape", attended, rows), *bounds)
        sizes = spec.pairs // spec.kv_pairs, block.latent, spec.value_dim
        y = self._by_head(of_latents, self._expansion(block, of_values=True), sizes, block)
        (gate,) = self.linears.products(query_latent, [self.plan.matrices[f"model.layers.{layer}{OUTPUT_GATE}"]])
        gated = graph.add("Mul", graph.add("Reshape", y, by_token), graph.add("Sigmoid", gate))
        return self._linear(gated, f"{prefix}wo")

    def _queries(self, query_latent: str, prefix: str, block: LatentAttentionBlock) -> str:
        """Name of the queries over latents, [B, T, (h+n)·row]."""
        graph, spec = self.graph, block.spec
        projected = self._linear(query_latent, f"{prefix}wq_b")
        heads = graph.add("Reshape", projected, graph.int64("by_head", (0, 0, spec.query_heads, spec.head_dim)))
        plain, turning = self.graph.split(heads, [block.plain, block.rope])
        groups = graph.add("Reshape", plain, graph.int64("by_group", (0, 0, spec.kv_pairs, -1, block.plain)))
        sizes = spec.query_heads // spec.kv_pairs, block.plain, block.latent
        within = self._by_head(groups, self._expansion(block, of_values=False), sizes, block)
        latents = graph.add("Reshape", within, graph.int64("by_latent", (0, 0, spec.query_heads, block.latent)))
        queries = graph.add("Concat", latents, self._turned(turning, block), axis=-1)
        rows = graph.add("Reshape", queries, graph.int64("one_behind_another", (0, 0, -1)))
        return self._times(rows, block.scale_factor)

    def _expansion(self, block: LatentAttentionBlock, of_values: bool) -> str:
        """Name of the matrices [G, plain, latent] that make keys of latents, or of those [G, latent, dv] to values."""
        matrix = self.plan.matrices[f"model.layers.{block.layer}{EXPANSION}"]
        by_head = torch.arange(matrix.shape[0]).view(block.spec.kv_pairs, -1)
        rows = by_head[:, block.plain :] if of_values else by_head[:, : block.plain]
        name = f"{matrix.module}.{'values' if of_values else 'keys'}"
        return head_matrices(self.linears, matrix, name, rows, is_transposed=of_values)

    def _by_head(self, x: str, matrices: str, sizes: tuple[int, int, int], block: LatentAttentionBlock) -> str:
        """Name of x [B, T, G, heads, in] times each group's matrix [in, out]; the sizes are heads, in and out."""
        graph, groups, (heads, inner, outer) = self.graph, block.spec.kv_pairs, sizes
        group_first = graph.add("Transpose", x, perm=[0, 2, 1, 3, 4])
        rows = graph.add("Reshape", group_first, graph.int64(f"group_rows.{inner}", (0, groups, -1, inner)))
        product = graph.add("MatMul", rows, matrices)
        by_head = graph.int64(f"group_heads.{heads}.{outer}", (0, groups, -1, heads, outer))
        return graph.add("Transpose", graph.add("Reshape", product, by_head), perm=[0, 2, 1, 3, 4])

    def _turned(self, x: str, block: LatentAttentionBlock) -> str:
        """Name of x [B, T, heads, rope] turned by each token's position."""
        graph, half = self.graph, block.rope // 2
        cos, sin = self._cos_and_sin(tuple(block.frequencies))
        a, b = self.graph.split(x, [half, half])
        first = graph.add("Sub", graph.add("Mul", a, cos), graph.add("Mul", b, sin))
        second = graph.add("Add", graph.add("Mul", b, cos), graph.add("Mul", a, sin))
        return graph.add("Concat", first, second, axis=-1)

    def _token_positions(self) -> str:
        """Name of the tokens' positions [B, T, 1, 1] in float32."""
        if not self._angles:
            places = self.graph.add("Add", self.tokens.before, self.tokens.steps)
            column = self.graph.add("Unsqueeze", places, self.graph.int64("angles_axes", (2, 3)))
            self.graph.add("Cast", column, to=TensorProto.FLOAT, name="positions")
        return "positions"

    def _cos_and_sin(self, frequencies: tuple[float, ...]) -> list[str]:
        """Names of the cosines and sines [B, T, 1, rope/2] of a layer's angles, which layers share."""
        if frequencies not in self._angles:
            name = f"frequencies.{len(self._angles)}"
            constant = self.graph.constant(name, np.array(frequencies, np.float32))
            angles = self.graph.add("Mul", self._token_positions(), constant)
            self._angles[frequencies] = [self.graph.narrow(self.graph.add(op, angles)) for op in ("Cos", "Sin")]
        return self._angles[frequencies]
