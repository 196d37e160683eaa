"""SambaY as an ONNX graph: Mamba's states and shared keys and values beside the op, whose windows differ by layer."""

from collections.abc import Mapping
from typing import cast

from onnx import FunctionProto, TensorProto, helper

from diffquant.export.graph.activations import EMITTED
from diffquant.export.graph.cache_scales import Scales
from diffquant.export.graph.decoder import LAYER_OUTPUT, PRESENT, Decoder
from diffquant.export.graph.mamba import (
    CAUSAL_CONVOLUTION,
    SELECTIVE_SCAN,
    causal_convolution_function,
    selective_scan_function,
)
from diffquant.export.graph.op import DOMAIN, NAME
from diffquant.export.graph.plan import ExportPlan
from diffquant.model.blocks import Block, Shape
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.model.sambay.blocks import FusedAttentionBlock, GatedMemoryBlock, LayerNormBlock, MambaBlock

# A layer's states by the names that transformers.js has for such, before and after a call.
PAST_STATE = "past_{state}.{layer}"
PRESENT_STATE = "present_{state}.{layer}"
STATES = ("conv", "ssm")


class SambaYDecoder(Decoder):
    """Layers of Mamba, gated memory and attention over windows, over all or over another layer's keys."""

    def __init__(self, plan: ExportPlan, scales: Mapping[int, Scales]) -> None:
        super().__init__(plan, scales)
        self.architecture = cast(SambaYArchitecture, plan.source.architecture)
        # What layers leave to later ones: the last Mamba its memory, and attention its new keys and values, those of
        # earlier calls, and their scales.
        self._memory = ""
        self._shared: tuple[list[str], list[str]] = ([], [])
        self._counts = self._is_token = ""

    def _own_functions(self) -> list[FunctionProto]:
        opset = self.options.opset
        return [causal_convolution_function(self.architecture.mamba_d_conv, opset), selective_scan_function(opset)]

    def _embedded(self, ids: str) -> str:
        graph, axis = self.graph, self.graph.int64("mask_axis", (1,))
        self._counts = graph.add("Squeeze", self.tokens.counts, axis, name="new_tokens")
        is_token = graph.add("Less", self.tokens.steps, self.tokens.counts)
        column = graph.add("Unsqueeze", is_token, graph.int64("channels_axis", (2,)))
        self._is_token = graph.add("Cast", column, to=TensorProto.FLOAT, name="is_token")
        return graph.wide(super()._embedded(ids))

    def _layer(self, x: str, layer: int) -> str:
        prefix = f"model.layers.{layer}."
        blocks, graph = self.architecture.layers[layer], self.graph
        normed = self._layer_norm(x, prefix + "input_layernorm", blocks["input_layernorm"])
        mixer = blocks["attn"]
        if isinstance(mixer, MambaBlock):
            mixed = self._mamba(normed, layer, mixer)
        elif isinstance(mixer, GatedMemoryBlock):
            mixed = self._gated(normed, prefix + "attn.")
        else:
            mixed = self._attention_over(normed, layer, cast(FusedAttentionBlock, mixer))
        x = graph.add("Add", x, self.graph.wide(mixed))
        normed = self._layer_norm(x, prefix + "post_attention_layernorm", blocks["post_attention_layernorm"])
        expanded = self.graph.wide(self._network(normed, prefix + "mlp."))
        return self._residual(graph.add("Add", x, expanded, name=LAYER_OUTPUT.format(layer=layer)))

    def _residual(self, x: str) -> str:
        """The residual's own name, which says its type: float32, whatever that of its branches is."""
        if self.graph.kind != TensorProto.FLOAT:
            self.graph.values.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, None))
        return x

    def _final_norm(self, x: str) -> str:
        name, norm = self.architecture.final_norm
        return self._layer_norm(x, f"model.{name}", norm)

    def _network(self, x: str, prefix: str) -> str:
        gate, value = self._halves(self._linear(x, prefix + "fc1"), self.config.intermediate_size)
        active = EMITTED[self.config.hidden_act](self.graph, gate, {})
        return self._linear(self.graph.add("Mul", value, active), prefix + "fc2")

    def _attention_over(self, x: str, layer: int, block: FusedAttentionBlock) -> str:
        prefix, graph = f"model.layers.{layer}.attn.", self.graph
        projected = self._linear(x, prefix + "Wqkv")
        if block.stored is None:
            # The new keys and values go behind the others once more: ONNX Runtime before 1.27 reads no cache alone.
            query, present = projected, [f"layers.{layer}.{part}" for part in ("keys", "values")]
        else:
            query, *new = (f"layers.{layer}.{part}" for part in ("query", "key", "value"))
            self.graph.split(projected, block.heights, [query, *new])
            self._shared = [*new, *self._past(layer)], self._cache_scales(layer)
            present = [PRESENT.format(layer=layer, part=part) for part in ("key", "value")]
            self._declare_present(present)
        (key, value, *past), scales = self._shared
        inner = prefix + "inner_cross_attn."
        lam = self._scalar_lam(layer, inner)
        inputs = [query, key, value, lam, *past, *self.tokens.lengths, "", "", *(scales or ["", ""]), "", ""]
        attended = f"layers.{layer}.attention"
        graph.add_all(NAME, inputs, [attended, *present], DOMAIN, **self._attributes(block.window).to_dict())
        return self._linear(self._post(attended, layer, inner), prefix + "out_proj")

    def _mamba(self, x: str, layer: int, block: MambaBlock) -> str:
        prefix, graph = f"model.layers.{layer}.attn.", self.graph
        u, gate = self._halves(self._linear(x, prefix + "in_proj"), block.inner)
        inputs = self._silu(self._convolved(u, layer, block, prefix))
        widths = [block.rank, block.states, block.states]
        low, into, out_of = (f"layers.{layer}.{name}" for name in ("step_low", "into", "out_of"))
        self.graph.split(self._linear(inputs, prefix + "x_proj"), widths, [low, into, out_of])
        scanned = self._scanned([inputs, self._step(low, prefix), into, out_of], layer, block, prefix)
        self._memory = self.graph.narrow(scanned)
        return self._linear(graph.add("Mul", self._memory, self._silu(gate)), prefix + "out_proj")

    def _convolved(self, u: str, layer: int, block: MambaBlock, prefix: str) -> str:
        taps = self.plan.vector(prefix + "conv1d.weight")[:, 0].T.contiguous()
        weight = self.graph.typed(f"layers.{layer}.conv1d.weight", taps)
        bias = self.graph.typed(f"layers.{layer}.conv1d.bias", self.plan.vector(prefix + "conv1d.bias"))
        past, present = self._state(layer, STATES[0], self.graph.kind, block.stored[0])
        y = f"layers.{layer}.convolved"
        self.graph.add_all(CAUSAL_CONVOLUTION, [u, weight, bias, self._counts, past], [y, present], DOMAIN)
        return y

    def _step(self, low: str, prefix: str) -> str:
        """Name of Δ [B, T, E] in float32, 0 where there is padding."""
        graph = self.graph
        weight = graph.typed(
            f"{prefix}dt_proj.weight", self.plan.small_matrix(prefix + "dt_proj.weight").T.contiguous()
        )
        bias = graph.constant(f"{prefix}dt_proj.bias", self.plan.vector(prefix + "dt_proj.bias").numpy())
        biased = graph.add("Add", self.graph.wide(graph.add("MatMul", low, weight)), bias)
        return graph.add("Mul", graph.add("Softplus", biased), self._is_token)

    def _scanned(self, inputs: list[str], layer: int, block: MambaBlock, prefix: str) -> str:
        """Name of the scan's output [B, T, E] in float32; the inputs are u, Δ, B and C."""
        graph = self.graph
        u, step, into, out_of = map(self.graph.wide, inputs)
        decays = graph.constant(f"layers.{layer}.A", (-self.plan.vector(prefix + "A_log").exp()).numpy())
        skip = graph.constant(f"layers.{layer}.D", self.plan.vector(prefix + "D").numpy())
        past, present = self._state(layer, STATES[1], TensorProto.FLOAT, block.stored[1])
        y = f"layers.{layer}.scanned"
        graph.add_all(SELECTIVE_SCAN, [u, step, decays, into, out_of, skip, past], [y, present], DOMAIN)
        return y

    def _state(self, layer: int, state: str, kind: int, shape: Shape) -> tuple[str, str]:
        """Names of a layer's state before and after the new tokens; without a cache it begins anew."""
        present = PRESENT_STATE.format(state=state, layer=layer)
        if not self.options.cache:
            like = self.graph.int64(f"shape.{state}", shape)
            whole = self.graph.add("Concat", self.graph.add("Shape", "input_ids", start=0, end=1), like, axis=0)
            zero = helper.make_tensor("zero", kind, [1], [0])
            return self.graph.add("ConstantOfShape", whole, value=zero), present
        sizes: list[str | int] = ["batch_size", *shape]
        self.graph.output(present, kind, sizes)
        return self.graph.input(PAST_STATE.format(state=state, layer=layer), kind, sizes), present

    def _gated(self, x: str, prefix: str) -> str:
        gate = self._silu(self._linear(x, prefix + "in_proj"))
        return self._linear(self.graph.add("Mul", self._memory, gate), prefix + "out_proj")

    def _layer_norm(self, x: str, name: str, norm: Block) -> str:
        weight, bias = (
            self.graph.typed(f"{name}.{part}", self.plan.vector(f"{name}.{part}")) for part in ("weight", "bias")
        )
        eps = cast(LayerNormBlock, norm).eps
        return self.graph.add("LayerNormalization", self.graph.narrow(x), weight, bias, axis=-1, epsilon=eps)

    def _silu(self, x: str) -> str:
        return EMITTED["silu"](self.graph, x, {})

    def _halves(self, x: str, width: int) -> tuple[str, str]:
        first, second = self.graph.unused_name("Half"), self.graph.unused_name("Half")
        self.graph.split(x, [width, width], [first, second])
        return first, second
