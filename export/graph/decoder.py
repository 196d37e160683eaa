"""A decoder as an ONNX graph: from ids to logits, with Llama's layers around the op, one node per attention."""

from collections.abc import Mapping, Sequence

import torch
from onnx import FunctionProto, ModelProto, TensorProto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.export.graph.activations import EMITTED, functions
from diffquant.export.graph.attention_functions import attention_function
from diffquant.export.graph.cache_scales import Scales
from diffquant.export.graph.inlining import inlined
from diffquant.export.graph.linears import Linears
from diffquant.export.graph.maps import MapOutputs
from diffquant.export.graph.matmul import MATMUL, matmul_function
from diffquant.export.graph.nodes import Graph
from diffquant.export.graph.norms import rms_norm
from diffquant.export.graph.op import CONTRIB, DOMAIN, NAME, VERSION, OpAttributes
from diffquant.export.graph.padding import SEQUENCE, Tokens, read_tokens, states_read
from diffquant.export.graph.plan import EMBEDDING, HEAD, ExportPlan, key_width
from diffquant.export.graph.quantized_attention import QUANTIZED_ATTENTION, quantized_attention_function
from diffquant.export.options import IR_VERSION
from diffquant.family.heads import PROJECTIONS
from diffquant.family.lam import LAMBDA_VECTORS, lam_from_vectors

PAST = "past_key_values.{layer}.{part}"
PRESENT = "present.{layer}.{part}"
EMBEDDED = "embedded"
LAYER_OUTPUT = "layers.{layer}.output"

_KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
_CACHE_KINDS = {8: TensorProto.INT8, 4: TensorProto.UINT8}


class Decoder:
    """A graph that is built node by node, from input ids to logits."""

    def __init__(self, plan: ExportPlan, scales: Mapping[int, Scales]) -> None:
        self.plan = plan
        self.spec = plan.spec
        self.config = plan.config
        self.options = plan.options
        self.scales = scales
        self.graph = Graph(_KINDS[plan.options.dtype])
        self.linears = Linears(self.graph, plan.options)
        self.cache_kind = _CACHE_KINDS[plan.options.kv_bits] if scales else self.graph.kind
        self.maps = MapOutputs(self.graph, plan.spec)
        self.tokens: Tokens

    def emit(self) -> None:
        graph, options = self.graph, self.options
        ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", SEQUENCE])
        mask = graph.input("attention_mask", TensorProto.INT64, ["batch_size", "total"])
        spans_rows = options.logits.quantizes and options.logits.granularity != "row"
        tokens = self.tokens = read_tokens(graph, ids, mask, spans_rows)
        x = self._embedded(tokens.ids)
        for layer in range(self.config.num_hidden_layers):
            with graph.module(f"layers.{layer}"):
                x = self._layer(x, layer)
        # A model with a cache generates, and a prompt's other logits are not asked for.
        x = states_read(graph, x, tokens.last_place if options.cache else tokens.places)
        x = self._final_norm(x)
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        (logits,) = self.linears.products(x, [self.plan.matrices[head]])
        graph.add("Identity", logits, name="logits")
        # By a size of 1 here onnxruntime-genai knows not to ask for the others.
        positions = 1 if options.cache else SEQUENCE
        graph.output("logits", graph.kind, ["batch_size", positions, self.config.vocab_size])
        # Readers of such models expect the logits first.
        graph.outputs.insert(0, graph.outputs.pop())
        if options.web:
            self.maps.declare()

    def model(self, initializers: dict[str, TensorProto]) -> ModelProto:
        own = functions(self.config.hidden_act, self.options.opset) + self._own_functions()
        if self.spec.maps == 2:
            own.append(attention_function(self.plan, self.graph.nodes, self._attributes()))
        elif self.scales:
            own.append(quantized_attention_function(self.options.opset, self.options.kv_bits, self.spec.rope != "none"))
        if any((node.domain, node.op_type) == (DOMAIN, MATMUL) for node in self.graph.nodes):
            own.append(matmul_function(self.options.opset))
        domains = {CONTRIB: 1} | ({DOMAIN: VERSION} if own else {})
        model = self.graph.model(initializers, self.options.opset, domains, IR_VERSION)
        model.functions.extend(own)
        return inlined(model) if self.options.portable else model

    def _own_functions(self) -> list[FunctionProto]:
        """Functions that the layers need beside attention, the activation and products."""
        return []

    def _attributes(self, window: int | None = None) -> OpAttributes:
        """Attributes of an attention node whose queries see so many of the newest keys, or all."""
        spec, options = self.spec, self.options
        return OpAttributes(
            num_pairs=spec.pairs,
            num_kv_pairs=spec.kv_pairs,
            generation=2 if spec.shared_k else 1,
            scale=spec.scale,
            do_rotary=int(spec.rope != "none"),
            # The rows of V1's projections are reordered so that its channels are neighbours.
            rotary_interleaved=int(spec.rope != "none" and (spec.rope == "interleaved" or not spec.shared_k)),
            local_window_size=window or -1,
            kv_bit_width=options.kv_bits if self.scales else 0,
            logit_bits=options.logits.bits if options.logits.quantizes else 0,
            logit_granularity=options.logits.granularity or "row",
            logit_shift=int(options.logits.shift),
            signals_per_noise=spec.signals_per_noise,
        )

    def _embedded(self, ids: str) -> str:
        return self.linears.lookup(ids, self.plan.matrices[EMBEDDING], EMBEDDED)

    def _layer(self, x: str, layer: int) -> str:
        prefix = f"model.layers.{layer}."
        eps = self.config.rms_norm_eps
        attended = self._attention(self._norm(x, prefix + "input_layernorm.weight", eps), layer)
        x = self.graph.add("Add", x, attended)
        expanded = self._mlp(self._norm(x, prefix + "post_attention_layernorm.weight", eps), prefix + "mlp.")
        return self.graph.add("Add", x, expanded, name=LAYER_OUTPUT.format(layer=layer))

    def _mlp(self, x: str, prefix: str) -> str:
        gate, up = self._linears(x, [prefix + name for name in ("gate_proj", "up_proj")])
        own = [name for name in self.plan.parameters if name.startswith(f"{prefix}act_fn.")]
        parameters = {
            name.rpartition(".")[2]: self.graph.constant(name, self.plan.vector(name).numpy()) for name in own
        }
        active = EMITTED[self.config.hidden_act](self.graph, gate, parameters)
        return self._linear(self.graph.add("Mul", active, up), prefix + "down_proj")

    def _attention(self, x: str, layer: int) -> str:
        prefix = f"model.layers.{layer}.self_attn."
        q, k, v = self._linears(x, [prefix + name for name in PROJECTIONS])
        past, present = self._past(layer), [PRESENT.format(layer=layer, part=part) for part in ("key", "value")]
        tables = list(self._tables()) if self.spec.rope != "none" else ["", ""]
        scales = self._cache_scales(layer)
        attended = f"layers.{layer}.attention"
        outputs = [attended, *present]
        if self.spec.maps == 1:
            self._plain_attention([q, k, v, *past, *self.tokens.lengths, *tables], scales, outputs)
            if gate := self._output_gate(x, layer):
                attended = self.graph.add("Mul", attended, gate)
        else:
            # onnx's reference evaluator wants a function's absent inputs named, as "", to the last one.
            signal_gate, lam = self._signal_gate_and_lam(x, layer)
            gates = [signal_gate, self._output_gate(x, layer)]
            inputs = [q, k, v, lam, *past, *self.tokens.lengths, *tables, *(scales or ["", ""]), *gates]
            self.graph.add_all(NAME, inputs, outputs, DOMAIN, **self._attributes().to_dict())
            if self.options.web:
                is_interleaved = bool(self._attributes().rotary_interleaved)
                self.maps.add(layer, q, lam, signal_gate, tables, is_interleaved, self.tokens)
        self._declare_present(present)
        return self._linear(self._post(attended, layer, prefix), prefix + "o_proj")

    def _plain_attention(self, inputs: list[str], scales: list[str], outputs: list[str]) -> None:
        """Add a Transformer's attention: ONNX Runtime's own, or where the cache is quantized an op with a kernel."""
        attributes: dict[str, float | int] = {
            "num_heads": self.spec.pairs,
            "kv_num_heads": self.spec.kv_pairs,
            "scale": self.spec.scale,
            "do_rotary": int(self.spec.rope != "none"),
            "rotary_interleaved": int(self.spec.rope == "interleaved"),
            "local_window_size": -1,
        }
        if scales:
            attributes["kv_bit_width"] = self.options.kv_bits
            self.graph.add_all(QUANTIZED_ATTENTION, [*inputs, *scales], outputs, DOMAIN, **attributes)
        else:
            self.graph.add_all("GroupQueryAttention", _trimmed(inputs), outputs, CONTRIB, **attributes)

    def _signal_gate_and_lam(self, x: str, layer: int) -> tuple[str, str]:
        """Names of the signal map's gate, "" for none, and of λ, in float32: [1] (V1), or [B, T, h] (V2, V3)."""
        prefix = f"model.layers.{layer}.self_attn."
        if self.spec.lam == "exp":
            return "", self._scalar_lam(layer, prefix)
        weight = self.plan.small_matrix(prefix + "lambda_proj.weight")
        x_float = self.graph.add("Cast", x, to=TensorProto.FLOAT)
        parts = (
            {"signal_gate": weight[0::2], "lambda": weight[1::2]}
            if self.spec.lam == "two-gates"
            else {"lambda": weight}
        )
        names = {}
        for name, rows in parts.items():
            constant = self.graph.constant(f"layers.{layer}.{name}_proj", rows.T.contiguous().numpy())
            names[name] = self.graph.add("Sigmoid", self.graph.add("MatMul", x_float, constant))
        return names.get("signal_gate", ""), names["lambda"]

    def _scalar_lam(self, layer: int, prefix: str) -> str:
        """Name of λ of V1, [1] in float32."""
        vectors = (self.plan.vector(prefix + name) for name in LAMBDA_VECTORS)
        lam = lam_from_vectors(*vectors, init=self.spec.lam_init(layer))
        return self.graph.constant(f"layers.{layer}.lambda", lam.reshape(1).numpy())

    def _output_gate(self, x: str, layer: int) -> str:
        """Name of the gate of each channel of the output, [B, T, h·dv]; "" for none."""
        if not self.spec.output_gate:
            return ""
        name = f"layers.{layer}.output_gate_proj"
        weight = self.plan.small_matrix(f"model.layers.{layer}.self_attn.output_gate_proj.weight")
        return self.graph.add("Sigmoid", self.graph.add("MatMul", x, self.graph.typed(name, weight.T.contiguous())))

    def _post(self, attended: str, layer: int, prefix: str) -> str:
        """Name of the output after the per-pair norm, whose weight takes the factor (1 - λ_init) in.

        Args:
            prefix: what the names of the attention's parameters begin with.
        """
        spec, graph = self.spec, self.graph
        factor = spec.post_factor(layer)
        if spec.post_norm == "none":
            return attended
        weight = torch.ones(spec.value_dim)
        if spec.post_norm == "affine":
            weight = self.plan.vector(prefix + "subln.weight")
        by_pair = graph.int64("by_pair", (0, 0, spec.pairs, spec.value_dim))
        rows = graph.add("Reshape", attended, by_pair)
        scaled = graph.typed(f"layers.{layer}.post_norm", weight * factor)
        normed = rms_norm(graph, rows, scaled, spec.post_norm_eps, self.options.opset)
        return graph.add("Reshape", normed, graph.int64("by_token", (0, 0, spec.pairs * spec.value_dim)))

    def _final_norm(self, x: str) -> str:
        return self._norm(x, "model.norm.weight", self.config.rms_norm_eps)

    def _norm(self, x: str, name: str, eps: float) -> str:
        weight = self.graph.typed(name, self.plan.vector(name))
        return rms_norm(self.graph, x, weight, eps, self.options.opset)

    def _linear(self, x: str, module: str) -> str:
        (y,) = self._linears(x, [module])
        return y

    def _linears(self, x: str, modules: list[str]) -> list[str]:
        """Names of what several linears make of the same input."""
        products = self.linears.products(x, [self.plan.matrices[f"{module}.weight"] for module in modules])
        return [self._biased(y, f"{module}.bias") for y, module in zip(products, modules, strict=True)]

    def _biased(self, y: str, name: str) -> str:
        if name not in self.plan.parameters:
            return y
        return self.graph.add("Add", y, self.graph.typed(name, self.plan.vector(name)))

    def _tables(self) -> tuple[str, str]:
        """Names of the tables cos and sin, a column for every two channels of a key row that rotate together."""
        if "cos_cache" not in self.graph.constants:
            positions = torch.arange(self.config.max_position_embeddings)[None]
            tables = LlamaRotaryEmbedding(self.config)(torch.zeros(1), position_ids=positions)
            keys_of_pair = key_width(self.spec) // self.spec.head_dim
            for name, table in zip(("cos_cache", "sin_cache"), tables, strict=True):
                self.graph.typed(name, table[0, :, : self.spec.head_dim // 2].repeat(1, keys_of_pair))
        return "cos_cache", "sin_cache"

    def _past(self, layer: int) -> list[str]:
        """Names of a layer's keys and values of earlier calls, which become inputs of the model; "" without a cache."""
        if not self.options.cache:
            return ["", ""]
        names = [PAST.format(layer=layer, part=part) for part in ("key", "value")]
        return [self.graph.input(name, self.cache_kind, self._cache_shape("past")) for name in names]

    def _declare_present(self, names: Sequence[str]) -> None:
        """Make a layer's keys and values outputs of the model, where it has a cache."""
        if self.options.cache:
            for name in names:
                self.graph.output(name, self.cache_kind, self._cache_shape("present"))

    def _cache_shape(self, rows: str) -> list[str | int]:
        width = key_width(self.spec)
        return ["batch_size", self.spec.kv_pairs, rows, width // 2 if self.cache_kind == TensorProto.UINT8 else width]

    def _cache_scales(self, layer: int) -> list[str]:
        if not self.scales:
            return []
        names = (f"layers.{layer}.k_scale", f"layers.{layer}.v_scale")
        return [self.graph.constant(n, value) for n, value in zip(names, self.scales[layer], strict=True)]


def _trimmed(inputs: list[str]) -> list[str]:
    """A node's inputs without the absent ones at the end."""
    while inputs and not inputs[-1]:
        inputs = inputs[:-1]
    return inputs
