"""Export of Motif-3: attention over latents, hyper-connections with several residual streams, and the torch reference.

The hidden states between layers are each token's E residual streams, concatenated to [B, T, E·D]. The op
`diffquant::ReadStreams`, described in docs/differential-attention-op.md, computes the input of attention or MLP from
them.

In functions that add a block, `x` is the name of its input, and names of its parameters start with `prefix`.
"""

from dataclasses import replace
from typing import cast

import numpy as np
import torch
from onnx import FunctionProto, TensorProto
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.model.blocks import Blocks, RMSNormBlock
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.motif3.blocks import LatentAttentionBlock, StreamGatesBlock
from diffquant.model.motif3.modeling import EPS, LARGEST_GATE, LARGEST_MIX, SMALLEST_SUM, Motif3Layer, Motif3Model
from diffquant.model.reading import Reading
from diffquant.model.windowed_cache import MixedCache
from diffquant.onnx.architectures.experts import add_head_matrices, scale_by
from diffquant.onnx.architectures.transformer import add_norm
from diffquant.onnx.graph.decoder import EMBEDDED, LAYER_OUTPUT, Decoder
from diffquant.onnx.graph.op import DOMAIN, AttentionAttributes, make_function
from diffquant.onnx.graph.plan import EMBEDDING
from diffquant.onnx.verification.caches import GrowingCache
from diffquant.onnx.verification.reference import Reference

READ_STREAMS = "ReadStreams"


def read_streams_function(streams: int, sinkhorn_iterations: int, opset: int) -> FunctionProto:
    """Return ReadStreams as an ONNX function in standard ops, which computes in float32.

    Args:
        streams: number E of residual streams.
        sinkhorn_iterations: number of times that rows and then columns of the mixing matrix are normalized.
        opset: the model's version of the standard ONNX domain, 18 or later.
    """
    signature = f"{READ_STREAMS} (x, weight, projection, alpha, bias) => (read, mixed, writes)"
    return make_function(signature, _text(streams, sinkhorn_iterations), opset)


def _text(streams: int, rounds: int) -> str:
    return f"""   flat = Cast <to = 1> (x)
   square = Mul (flat, flat)
   last = Constant <value = int64[1] {{-1}}> ()
   mean = ReduceMean (square, last)
   epsilon = Constant <value_float = {EPS!r}> ()
   raised = Add (mean, epsilon)
   root = Sqrt (raised)
   normed = Div (flat, root)
   weighted = Mul (normed, weight)
   product = MatMul (weighted, projection)
   scaled = Mul (product, alpha)
   gates = Add (scaled, bias)
   sizes = Constant <value = int64[3] {{{streams}, {streams}, {streams**2}}}> ()
   pre, post, res = Split <axis = -1> (gates, sizes)
   largest = Constant <value_float = {LARGEST_GATE!r}> ()
   least = Constant <value_float = {-LARGEST_GATE!r}> ()
   pre_clipped = Clip (pre, least, largest)
   post_clipped = Clip (post, least, largest)
   reads = Sigmoid (pre_clipped)
   writes_row = Sigmoid (post_clipped)
   writes = Unsqueeze (writes_row, last)
   by_stream = Constant <value = int64[4] {{0, 0, {streams}, -1}}> ()
   streams = Reshape (flat, by_stream)
   second = Constant <value = int64[1] {{2}}> ()
   reads_row = Unsqueeze (reads, second)
   read_row = MatMul (reads_row, streams)
   read_wide = Squeeze (read_row, second)
   read = CastLike (read_wide, x)
   by_pair = Constant <value = int64[4] {{0, 0, {streams}, {streams}}}> ()
   res_matrix = Reshape (res, by_pair)
   largest_mix = Constant <value_float = {LARGEST_MIX!r}> ()
   least_mix = Constant <value_float = {-LARGEST_MIX!r}> ()
   res_clipped = Clip (res_matrix, least_mix, largest_mix)
   positive = Exp (res_clipped)
   rounds = Constant <value_int = {rounds}> ()
   always = Constant <value = bool {{1}}> ()
   balanced = Loop <body = balance (int64 round, bool goes, float[b, t, e, f] mix) =>
      (bool goes_on, float[b, t, e, f] next) {{
      goes_on = Identity (goes)
      smallest = Constant <value_float = {SMALLEST_SUM!r}> ()
      row_axis = Constant <value = int64[1] {{-1}}> ()
      column_axis = Constant <value = int64[1] {{-2}}> ()
      row_sums = ReduceSum (mix, row_axis)
      row_divisors = Max (row_sums, smallest)
      by_rows = Div (mix, row_divisors)
      column_sums = ReduceSum (by_rows, column_axis)
      column_divisors = Max (column_sums, smallest)
      next = Div (by_rows, column_divisors)
   }}> (rounds, always, positive)
   mixed = MatMul (balanced, streams)"""


_ANGLES, _POSITIONS = "angles", "positions"


class Motif3Reference(Reference):
    """The torch reference of an exported Motif-3 model."""

    packs = False

    def _embed(self, ids: Tensor) -> Tensor:
        return self._decoder.initial_state(super()._embed(ids)).flatten(-2)

    def _final_norm(self, x: Tensor) -> Tensor:
        return super()._final_norm(self._streams(x).mean(-2))

    def _output_of_call(self, number: int, x: Tensor, first: int, cache: GrowingCache) -> Tensor:
        layer = cast(Motif3Layer, self.model.model.layers[number])
        masks = Mask(None), Mask(None, self._decoder.architecture.window)
        reading = Reading(*masks, 0, cast(MixedCache, cache))
        positions = torch.arange(first, first + x.shape[1])[None]
        tables = self._decoder.layer_rotary_tables(positions, x)[number]
        output: Tensor = layer(self._streams(x), tables, reading).flatten(-2)
        return output

    def adapt_random_cache(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A value is the latent part of the key, padded with zeros.
        architecture = self._decoder.architecture
        share = architecture.kv_lora_rank / (architecture.kv_lora_rank + architecture.qk_rope_head_dim)
        end = round(keys.shape[-1] * share)
        nothing = 0x88 if keys.dtype == np.uint8 else 0
        return keys, np.concatenate([keys[..., :end], np.full_like(values[..., end:], nothing)], -1)

    @property
    def _decoder(self) -> Motif3Model:
        return cast(Motif3Model, self.model.model)

    def _streams(self, x: Tensor) -> Tensor:
        streams: Tensor = x.unflatten(-1, (self._decoder.architecture.mhc_expansion_rate, -1))
        return streams


class Motif3Decoder(Decoder):
    """Builds Motif-3's ONNX graph, with latent attention, experts and several residual streams."""

    reference_class = Motif3Reference
    architecture: Motif3Architecture

    def attention_attributes(self, window: int | None = None) -> AttentionAttributes:
        # The scale is that of the model's own queries, which are narrower than those over latents.
        return replace(super().attention_attributes(window), scale=self.architecture.diff_spec.scale)

    def add_embedding(self, ids: str) -> str:
        rows = self.linears.add_lookup(ids, self.plan.matrices[EMBEDDING], "token_rows")
        return self.graph.add("Concat", *[rows] * self.architecture.mhc_expansion_rate, axis=-1, name=EMBEDDED)

    def add_layer(self, x: str, blocks: Blocks) -> str:
        mixer, network, first, second, *gates = blocks
        for gate, before, part, name in zip(
            gates, (first, second), (mixer, network), (None, LAYER_OUTPUT.format(layer=self.layer)), strict=True
        ):
            read, mixed, writes = self.add_layer_block(x, gate)
            y = self.add_layer_block(self.add_layer_block(read, before), part)
            x = self._written(mixed, y, writes, name)
        return x

    def add_final_norm(self, x: str) -> str:
        graph = self.graph
        by_stream = graph.int64("by_stream", (0, 0, self.architecture.mhc_expansion_rate, self.config.hidden_size))
        streams = graph.to_float32(graph.add("Reshape", x, by_stream))
        mean = graph.add("ReduceMean", streams, graph.int64("streams_axis", (2,)), keepdims=0)
        return super().add_final_norm(graph.to_activation_type(mean))

    def _written(self, mixed: str, y: str, writes: str, name: str | None) -> str:
        graph = self.graph
        row = graph.add("Unsqueeze", graph.to_float32(y), graph.int64("streams_axis", (2,)))
        streams = graph.to_activation_type(graph.add("Add", mixed, graph.add("Mul", writes, row)))
        return graph.add("Reshape", streams, graph.int64("one_behind_another", (0, 0, -1)), name=name)


def add_read_streams(decoder: Decoder, x: str, prefix: str, block: StreamGatesBlock) -> tuple[str, str, str]:
    """Add the ReadStreams node before attention or MLP.

    Returns:
        Names of the input [B, T, D] of attention or MLP, the mixed streams [B, T, E, D], and the factors [B, T, E, 1]
        by which the output of attention or MLP is multiplied before it is added to the streams.
    """
    graph, plan = decoder.graph, decoder.plan
    decoder.add_function(read_streams_function(block.streams, block.rounds, decoder.options.opset))
    heights = {gate: int(np.prod(shape)) for gate, shape in block.gate_shapes.items()}
    parts = {
        "projection": torch.cat([plan.read_small_matrix(f"{prefix}.proj_{gate}.weight") for gate in heights]).T,
        "alpha": torch.cat([plan.read_vector(f"{prefix}.alpha_{gate}").expand(n) for gate, n in heights.items()]),
        "bias": torch.cat([plan.read_vector(f"{prefix}.bias_{gate}").flatten() for gate in heights]),
    }
    inputs = [graph.constant(f"{prefix}.{name}", values.contiguous().numpy()) for name, values in parts.items()]
    weight = graph.constant(f"{prefix}.weight", plan.read_vector(f"{prefix}.rms_norm.weight").numpy())
    read, mixed, writes = names = [f"{prefix}.{name}" for name in ("read", "mixed", "writes")]
    graph.add_with_outputs(READ_STREAMS, [x, weight, *inputs], names, DOMAIN)
    return read, mixed, scale_by(decoder, writes, block.post_scale, is_float32=True)


def add_latent_attention(decoder: Decoder, x: str, prefix: str, block: LatentAttentionBlock) -> str:
    """Add attention over latents, and return its output's name.

    Latents are not expanded: queries are multiplied by the key matrices, and outputs by the value matrices.
    """
    graph, spec = decoder.graph, block.spec
    of_query, kept = decoder.add_linears(x, [f"{prefix}.wq_a", f"{prefix}.wkv_a"])
    query_latent = add_norm(decoder, of_query, f"{prefix}.q_norm", RMSNormBlock(0, block.eps))
    raw, turning = graph.split(kept, [block.latent, block.rope])
    latent = add_norm(decoder, raw, f"{prefix}.kv_norm", RMSNormBlock(0, block.eps))
    by_head = graph.int64("one_head", (0, 0, 1, block.rope))
    by_token = graph.int64("one_behind_another", (0, 0, -1))
    turned = graph.add("Reshape", _rotate(decoder, graph.add("Reshape", turning, by_head), block), by_token)
    key = graph.add("Concat", latent, turned, axis=-1)
    value = graph.add("Pad", latent, graph.int64("behind_a_latent", (0, 0, 0, 0, 0, block.rope)))
    signal_gate, lam = decoder.add_signal_gate_and_lam(x, prefix)
    present = decoder.add_present_outputs()
    inputs = [_queries(decoder, query_latent, prefix, block), key, value, lam, *decoder.add_past_inputs()]
    inputs += [*decoder.tokens.lengths, "", ""]
    inputs += [*(decoder.add_cache_scales() or ["", ""]), signal_gate, ""]
    attended = decoder.add_attention_node(inputs, present, block.window)
    rows = graph.int64("pairs_by_group", (0, 0, spec.kv_pairs, -1, block.latent + block.rope))
    bounds = [graph.int64(f"channel.{bound}", (bound,)) for bound in (0, block.latent, -1)]
    of_latents = graph.add("Slice", graph.add("Reshape", attended, rows), *bounds)
    sizes = spec.pairs // spec.kv_pairs, block.latent, spec.value_dim
    y = _by_head(decoder, of_latents, _expansion(decoder, prefix, block, of_values=True), sizes, block)
    (gate,) = decoder.linears.add_products(query_latent, [decoder.plan.matrices[f"{prefix}.wq_b_gate.weight"]])
    gated = graph.add("Mul", graph.add("Reshape", y, by_token), graph.add("Sigmoid", gate))
    return decoder.add_linear(gated, f"{prefix}.wo")


def _queries(decoder: Decoder, query_latent: str, prefix: str, block: LatentAttentionBlock) -> str:
    """Add the queries over latents [B, T, (h+n)·row], and return their name."""
    graph, spec = decoder.graph, block.spec
    projected = decoder.add_linear(query_latent, f"{prefix}.wq_b")
    heads = graph.add("Reshape", projected, graph.int64("by_head", (0, 0, spec.query_heads, spec.head_dim)))
    plain, turning = graph.split(heads, [block.unrotated_width, block.rope])
    groups = graph.add("Reshape", plain, graph.int64("by_group", (0, 0, spec.kv_pairs, -1, block.unrotated_width)))
    sizes = spec.query_heads // spec.kv_pairs, block.unrotated_width, block.latent
    within = _by_head(decoder, groups, _expansion(decoder, prefix, block, of_values=False), sizes, block)
    latents = graph.add("Reshape", within, graph.int64("by_latent", (0, 0, spec.query_heads, block.latent)))
    queries = graph.add("Concat", latents, _rotate(decoder, turning, block), axis=-1)
    rows = graph.add("Reshape", queries, graph.int64("one_behind_another", (0, 0, -1)))
    return scale_by(decoder, rows, block.scale_factor)


def _expansion(decoder: Decoder, prefix: str, block: LatentAttentionBlock, of_values: bool) -> str:
    """Add the matrices [G, plain, latent] of keys, or [G, latent, dv] of values, and return their name."""
    matrix = decoder.plan.matrices[f"{prefix}.wkv_b.weight"]
    by_head = torch.arange(matrix.shape[0]).view(block.spec.kv_pairs, -1)
    rows = by_head[:, block.unrotated_width :] if of_values else by_head[:, : block.unrotated_width]
    name = f"{matrix.module}.{'values' if of_values else 'keys'}"
    return add_head_matrices(decoder.linears, matrix, name, rows, is_transposed=of_values)


def _by_head(decoder: Decoder, x: str, matrices: str, sizes: tuple[int, int, int], block: LatentAttentionBlock) -> str:
    """Add the matmul of x [B, T, G, heads, in] with each group's matrix [in, out]; `sizes` are heads, in and out."""
    graph, groups, (heads, inner, outer) = decoder.graph, block.spec.kv_pairs, sizes
    group_first = graph.add("Transpose", x, perm=[0, 2, 1, 3, 4])
    rows = graph.add("Reshape", group_first, graph.int64(f"group_rows.{inner}", (0, groups, -1, inner)))
    product = graph.add("MatMul", rows, matrices)
    by_head = graph.int64(f"group_heads.{heads}.{outer}", (0, groups, -1, heads, outer))
    return graph.add("Transpose", graph.add("Reshape", product, by_head), perm=[0, 2, 1, 3, 4])


def _rotate(decoder: Decoder, x: str, block: LatentAttentionBlock) -> str:
    """Add RoPE of x [B, T, heads, rope], and return the result's name."""
    graph, half = decoder.graph, block.rope // 2
    cos, sin = _cos_and_sin(decoder, tuple(block.frequencies))
    a, b = graph.split(x, [half, half])
    first = graph.add("Sub", graph.add("Mul", a, cos), graph.add("Mul", b, sin))
    second = graph.add("Add", graph.add("Mul", b, cos), graph.add("Mul", a, sin))
    return graph.add("Concat", first, second, axis=-1)


def _cos_and_sin(decoder: Decoder, frequencies: tuple[float, ...]) -> list[str]:
    """Return the names of RoPE's cosines and sines [B, T, 1, rope/2], added once for layers with equal frequencies."""
    graph = decoder.graph
    angles: dict[tuple[float, ...], list[str]] = decoder.shared_values.setdefault(_ANGLES, {})
    if frequencies not in angles:
        constant = graph.constant(f"frequencies.{len(angles)}", np.array(frequencies, np.float32))
        if not angles:
            # Each new token's position, [B, T, 1, 1].
            places = graph.add("Add", decoder.tokens.before, decoder.tokens.steps)
            column = graph.add("Unsqueeze", places, graph.int64("angles_axes", (2, 3)))
            graph.add("Cast", column, to=TensorProto.FLOAT, name=_POSITIONS)
        turned = graph.add("Mul", _POSITIONS, constant)
        angles[frequencies] = [graph.to_activation_type(graph.add(op, turned)) for op in ("Cos", "Sin")]
    return angles[frequencies]
