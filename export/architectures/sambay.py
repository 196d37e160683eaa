"""Export of SambaY: Mamba, gated memory, attention over shared keys and values, and the torch reference.

In functions that add a block, `x` is the name of its input [B, T, D], and names of its parameters start with `prefix`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from diffquant.family.mask import Mask
from diffquant.model.blocks import Shape
from diffquant.model.reading import Reading
from diffquant.model.sambay.architecture import (
    FusedAttentionBlock,
    FusedMLPBlock,
    GatedMemoryBlock,
    LayerNormBlock,
    MambaBlock,
    SambaYArchitecture,
)
from diffquant.model.sambay.layers import LayerState, SambaYLayer, layer_norm
from diffquant.model.windowed_cache import MixedCache, RecurrentLayer
from diffquant.onnx.graph.decoder import Decoder
from diffquant.onnx.graph.nodes import EMITTED
from diffquant.onnx.graph.op import DOMAIN
from diffquant.onnx.graph.ops import (
    CAUSAL_CONVOLUTION,
    SELECTIVE_SCAN,
    causal_convolution_function,
    selective_scan_function,
)
from diffquant.onnx.verification.caches import GrowingCache, Past, StaticScaleCache
from diffquant.onnx.verification.reference import Reference

# Names of a layer's recurrent states before and after a call, as transformers.js expects them.
PAST_STATE = "past_{state}.{layer}"
PRESENT_STATE = "present_{state}.{layer}"
STATES = ("conv", "ssm")
_COUNTS, _IS_TOKEN = "new_tokens", "is_token"
# Keys of `Decoder.shared_values`: the last Mamba layer's output, and an attention layer's new and past keys and values
# with their scales.
_MEMORY, _SHARED = "memory", "shared"


class SambaYReference(Reference):
    """The torch reference of an exported SambaY model.

    Each layer gets the runtime's hidden states. The memory, keys and values that it reads from earlier layers come from
    the reference, which stored them when it computed those layers. So layers are computed in order, for one passage at
    a time.
    """

    _flow: LayerState | None = None

    packs = False

    @torch.no_grad()
    def compute_stage(self, number: int, sequences: Sequence[Tensor], firsts: Sequence[int] = ()) -> list[Tensor]:
        # Nothing is reused or skipped: a recurrent state depends on every token before it.
        computed = self._compute(number, sequences, [()] * len(sequences))
        return [output[:, first:] for (output, _), first in zip(computed, firsts or [0] * len(sequences), strict=True)]

    def _final_norm(self, x: Tensor) -> Tensor:
        return layer_norm(cast(nn.LayerNorm, self.model.model.final_layernorm), x)

    def _layer_output(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002  stages keep nothing
        layer = cast(SambaYLayer, self.model.model.layers[number])
        window = cast(SambaYArchitecture, self.model.model.architecture).sliding_window
        cache = _LayerCache(self.cache, self._reading.past, len(x))
        reading = Reading(Mask(None), Mask(None, window), 0, cast(MixedCache, cache))
        before = LayerState(x) if number == 0 or self._flow is None else self._flow
        parts: list[LayerState] = []
        begin, length = 0, x.shape[1]
        for chunk in x.split(list(self._reading.calls) or length, 1):
            end = begin + chunk.shape[1]
            parts.append(layer(_cut_flow(before, chunk, slice(begin, end), length), reading))
            begin = end
        memory = [part.memory for part in parts if part.memory is not None]
        output = torch.cat([part.x for part in parts], 1)
        self._flow = LayerState(output, torch.cat(memory, 1) if memory else None, parts[-1].shared)
        return output, ()

    def _disturb(self, output: Any, size: float) -> Any:
        if isinstance(output, LayerState):
            return LayerState(super()._disturb(output.x, size), output.memory, output.shared)
        return super()._disturb(output, size)


class _LayerCache(GrowingCache):
    """A cache of one layer of any kind: keys and values, or recurrent states.

    Attributes:
        state: recurrent states of a Mamba layer.
    """

    def __init__(self, static: StaticScaleCache | None, past: Past | None, batch: int) -> None:
        super().__init__(static, past)
        self.state = RecurrentLayer()
        if past is not None and past.states is not None:
            self.state.write(*(x.expand(batch, -1, -1) for x in past.states))

    def recurrent_layer(self, _layer: int) -> RecurrentLayer:
        return self.state


def _cut_flow(flow: LayerState, x: Tensor, tokens: slice, length: int) -> LayerState:
    """Cut a layer's input to some of a pass's tokens, and its shared keys and values to the last of them."""
    memory = None if flow.memory is None else flow.memory[:, tokens]
    shared = flow.shared
    if shared is not None:
        hidden = length - tokens.stop
        keys, values = (rows[:, :, : rows.shape[2] - hidden] for rows in shared)
        shared = keys, values
    return LayerState(x, memory, shared)


class SambaYDecoder(Decoder):
    """Builds SambaY's ONNX graph, with layers of Mamba, gated memory units and attention.

    Attention is over all tokens, within a window, or over the keys and values of an earlier layer.
    """

    reference_class = SambaYReference
    has_wide_residual = True

    def add_embedding(self, ids: str) -> str:
        graph, axis = self.graph, self.graph.int64("mask_axis", (1,))
        graph.add("Squeeze", self.tokens.counts, axis, name=_COUNTS)
        is_token = graph.add("Less", self.tokens.steps, self.tokens.counts)
        column = graph.add("Unsqueeze", is_token, graph.int64("channels_axis", (2,)))
        graph.add("Cast", column, to=TensorProto.FLOAT, name=_IS_TOKEN)
        return super().add_embedding(ids)


def add_norm(decoder: Decoder, x: str, prefix: str, block: LayerNormBlock) -> str:
    """Add a LayerNorm in the activations' type, and return its output's name."""
    names = (f"{prefix}.{part}" for part in ("weight", "bias"))
    weight, bias = (decoder.graph.typed_constant(name, decoder.plan.read_vector(name)) for name in names)
    graph = decoder.graph
    return graph.add("LayerNormalization", graph.to_activation_type(x), weight, bias, axis=-1, epsilon=block.eps)


def add_mlp(decoder: Decoder, x: str, prefix: str, block: FusedMLPBlock) -> str:
    """Add a gated MLP whose gate and up projections are one weight, and return its output's name."""
    gate, value = decoder.graph.split(decoder.add_linear(x, f"{prefix}.fc1"), [block.inner] * 2)
    active = EMITTED[block.activation](decoder.graph, gate, {})
    return decoder.add_linear(decoder.graph.add("Mul", value, active), f"{prefix}.fc2")


def add_attention(decoder: Decoder, x: str, prefix: str, block: FusedAttentionBlock) -> str:
    """Add attention, and return its output's name.

    If the block caches no keys and values, it uses those of an earlier layer.
    """
    layer, graph = block.layer, decoder.graph
    projected = decoder.add_linear(x, f"{prefix}.Wqkv")
    if block.cached_shapes is None:
        # The shared new keys and values are appended again: before 1.27, ONNX Runtime needs new ones with a cache.
        query, present = projected, [f"layers.{layer}.{part}" for part in ("keys", "values")]
    else:
        query, *new = (f"layers.{layer}.{part}" for part in ("query", "key", "value"))
        graph.split(projected, block.row_counts, [query, *new])
        decoder.shared_values[_SHARED] = [*new, *decoder.add_past_inputs()], decoder.add_cache_scales()
        present = decoder.add_present_outputs()
    (key, value, *past), scales = decoder.shared_values[_SHARED]
    inner = f"{prefix}.inner_cross_attn"
    lam = decoder.add_scalar_lam(inner)
    inputs = [query, key, value, lam, *past, *decoder.tokens.lengths, "", "", *(scales or ["", ""]), "", ""]
    attended = decoder.add_attention_node(inputs, present, block.window)
    return decoder.add_linear(decoder.add_post_norm(attended, inner), f"{prefix}.out_proj")


def add_mamba(decoder: Decoder, x: str, prefix: str, block: MambaBlock) -> str:
    """Add a Mamba-1 block, and return its output's name.

    In a model with a cache, the states of the convolution and of the scan are inputs and outputs of the model.
    """
    graph, layer, opset = decoder.graph, decoder.layer, decoder.options.opset
    decoder.add_function(causal_convolution_function(block.kernel_size, opset))
    decoder.add_function(selective_scan_function(opset))
    u, gate = graph.split(decoder.add_linear(x, f"{prefix}.in_proj"), [block.inner] * 2)
    inputs = _silu(decoder, _convolve(decoder, u, prefix, block))
    widths = [block.rank, block.states, block.states]
    low, into, out_of = (f"layers.{layer}.{name}" for name in ("step_low", "into", "out_of"))
    graph.split(decoder.add_linear(inputs, f"{prefix}.x_proj"), widths, [low, into, out_of])
    scanned = _scan(decoder, [inputs, _step(decoder, low, prefix), into, out_of], prefix, block)
    memory = decoder.shared_values[_MEMORY] = graph.to_activation_type(scanned)
    return decoder.add_linear(graph.add("Mul", memory, _silu(decoder, gate)), f"{prefix}.out_proj")


def add_gated_memory(decoder: Decoder, x: str, prefix: str, block: GatedMemoryBlock) -> str:  # noqa: ARG001  sizes are the weights'
    """Add a gated memory unit, and return its output's name.

    It multiplies the last Mamba layer's scan output by a gate that is computed from x.
    """
    gate = _silu(decoder, decoder.add_linear(x, f"{prefix}.in_proj"))
    return decoder.add_linear(decoder.graph.add("Mul", decoder.shared_values[_MEMORY], gate), f"{prefix}.out_proj")


def _convolve(decoder: Decoder, u: str, prefix: str, block: MambaBlock) -> str:
    graph, layer = decoder.graph, decoder.layer
    taps = decoder.plan.read_vector(f"{prefix}.conv1d.weight")[:, 0].T.contiguous()
    weight = graph.typed_constant(f"layers.{layer}.conv1d.weight", taps)
    bias = graph.typed_constant(f"layers.{layer}.conv1d.bias", decoder.plan.read_vector(f"{prefix}.conv1d.bias"))
    past, present = _state(decoder, STATES[0], graph.kind, block.cached_shapes[0])
    y = f"layers.{layer}.convolved"
    graph.add_with_outputs(CAUSAL_CONVOLUTION, [u, weight, bias, _COUNTS, past], [y, present], DOMAIN)
    return y


def _step(decoder: Decoder, low: str, prefix: str) -> str:
    """Add the step size Δ [B, T, E] in float32, 0 for padding, and return its name."""
    graph, name = decoder.graph, f"{prefix}.dt_proj"
    weight = graph.typed_constant(f"{name}.weight", decoder.plan.read_small_matrix(f"{name}.weight").T.contiguous())
    bias = graph.constant(f"{name}.bias", decoder.plan.read_vector(f"{name}.bias").numpy())
    biased = graph.add("Add", graph.to_float32(graph.add("MatMul", low, weight)), bias)
    return graph.add("Mul", graph.add("Softplus", biased), _IS_TOKEN)


def _scan(decoder: Decoder, inputs: list[str], prefix: str, block: MambaBlock) -> str:
    """Add the selective scan of the inputs u, Δ, B and C; return the name of its output [B, T, E] in float32."""
    graph, layer = decoder.graph, decoder.layer
    u, step, into, out_of = map(graph.to_float32, inputs)
    decays = graph.constant(f"layers.{layer}.A", (-decoder.plan.read_vector(f"{prefix}.A_log").exp()).numpy())
    skip = graph.constant(f"layers.{layer}.D", decoder.plan.read_vector(f"{prefix}.D").numpy())
    past, present = _state(decoder, STATES[1], TensorProto.FLOAT, block.cached_shapes[1])
    y = f"layers.{layer}.scanned"
    graph.add_with_outputs(SELECTIVE_SCAN, [u, step, decays, into, out_of, skip, past], [y, present], DOMAIN)
    return y


def _state(decoder: Decoder, state: str, kind: int, shape: Shape) -> tuple[str, str]:
    """Add a layer's recurrent state, and return its names before and after the call.

    They become an input and an output of the model. Without a cache, the state before the call is zero, and the one
    after it is no output.
    """
    graph, layer = decoder.graph, decoder.layer
    present = PRESENT_STATE.format(state=state, layer=layer)
    if not decoder.options.cache:
        like = graph.int64(f"shape.{state}", shape)
        whole = graph.add("Concat", graph.add("Shape", "input_ids", start=0, end=1), like, axis=0)
        zero = helper.make_tensor("zero", kind, [1], [0])
        return graph.add("ConstantOfShape", whole, value=zero), present
    sizes: list[str | int] = ["batch_size", *shape]
    graph.output(present, kind, sizes)
    return graph.input(PAST_STATE.format(state=state, layer=layer), kind, sizes), present


def _silu(decoder: Decoder, x: str) -> str:
    return EMITTED["silu"](decoder.graph, x, {})
