"""Building of a decoder's ONNX graph, from token ids to logits; each kind of block has a function that adds its nodes.

Methods that add nodes return the name of the value that they compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from onnx import FunctionProto, ModelProto, TensorProto, helper

from diffquant.family.norm import LAMBDA_VECTORS, lam_from_vectors
from diffquant.model.blocks import Block, Blocks
from diffquant.onnx.graph.body import BodyKind, contrib_problems, make_function_body
from diffquant.onnx.graph.linears import FLOAT_KINDS, Linears
from diffquant.onnx.graph.nodes import Graph, add_rms_norm, inline_functions, poly_norm_function
from diffquant.onnx.graph.op import CONTRIB, DOMAIN, GATES, NAME, VERSION, AttentionAttributes
from diffquant.onnx.graph.ops import MATMUL, matmul_function, quantized_attention_function
from diffquant.onnx.graph.padding import SEQUENCE, TokenInputs, add_padding_shift, gather_head_inputs
from diffquant.onnx.graph.plan import EMBEDDING, HEAD, ExportPlan, Scales, cached_key_width

PAST = "past_key_values.{layer}.{part}"
PRESENT = "present.{layer}.{part}"
EMBEDDED = "embedded"
LAYER_OUTPUT = "layers.{layer}.output"

_CACHE_KINDS = {8: TensorProto.INT8, 4: TensorProto.UINT8}


class Decoder:
    """Builds a model's ONNX graph: layers of a mixer (attention, for example) and an MLP, with a norm before each.

    Methods that add nodes return the names of the outputs. Arguments called `x` are names of inputs [B, T, D]: batch
    size B, T new tokens, hidden size D. Names of a block's parameters start with the argument `prefix`.

    Attributes:
        reference_class: class of the torch reference with which `verify` compares the graph.
        has_wide_residual: whether the residual stream is float32 even if activations are float16.
        tokens: names of values that describe a call's tokens.
        layer: index of the layer that is being added.
        shared_values: values that blocks store for later blocks, by key.
    """

    reference_class: ClassVar[Any]
    has_wide_residual = False

    def __init__(self, plan: ExportPlan, scales: Mapping[int, Scales]) -> None:
        self.plan = plan
        self.architecture = plan.source.architecture
        self.spec = plan.spec
        self.config = plan.config
        self.options = plan.options
        self.scales = scales
        self.graph = Graph(FLOAT_KINDS[plan.options.torch_dtype])
        self.linears = Linears(self.graph, plan.options)
        self.cache_kind = _CACHE_KINDS[plan.options.kv_bits] if scales else self.graph.kind
        self.tokens: TokenInputs
        self.layer = 0
        self.shared_values: dict[str, Any] = {}
        self._functions: dict[str, FunctionProto] = {}

    def add_all_nodes(self) -> None:
        """Add all nodes to the graph, from the token ids to the logits; call it once, before `model`."""
        graph, options = self.graph, self.options
        ids = graph.input("input_ids", TensorProto.INT64, ["batch_size", SEQUENCE])
        mask = graph.input("attention_mask", TensorProto.INT64, ["batch_size", "total"])
        spans_rows = options.logits.quantizes and options.logits.granularity != "row"
        tokens = self.tokens = add_padding_shift(graph, ids, mask, spans_rows)
        x = self.add_embedding(tokens.ids)
        for layer, blocks in enumerate(self.architecture.layers):
            self.layer = layer
            with graph.module_scope(f"layers.{layer}"):
                x = self.add_layer(x, blocks)
        # A model with a cache is for generation, which needs only the last token's logits.
        x = gather_head_inputs(graph, x, tokens.last_place if options.cache else tokens.places)
        x = self.add_final_norm(x)
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        (logits,) = self.linears.add_products(x, [self.plan.matrices[head]])
        graph.add("Identity", logits, name="logits")
        # onnxruntime-genai does not ask for the other positions if this size is 1.
        positions = 1 if options.cache else SEQUENCE
        graph.output("logits", graph.kind, ["batch_size", positions, self.config.vocab_size])
        # Programs that run such models expect the logits first.
        graph.outputs.insert(0, graph.outputs.pop())

    def model(self, initializers: dict[str, TensorProto]) -> ModelProto:
        """Return the finished ONNX model; `initializers` are the tensors of the data file, by name."""
        own = [poly_norm_function(self.options.opset)] if self.config.hidden_act == "poly_norm" else []
        own += self._functions.values()
        if self.spec.maps == 2:
            own.append(self._attention_function())
        elif self.scales:
            own.append(quantized_attention_function(self.options.opset, self.options.kv_bits, self.spec.rope != "none"))
        if any((node.domain, node.op_type) == (DOMAIN, MATMUL) for node in self.graph.nodes):
            own.append(matmul_function(self.options.opset))
        domains = {CONTRIB: 1} | ({DOMAIN: VERSION} if own else {})
        model = self.graph.model(initializers, self.options.opset, domains)
        model.functions.extend(own)
        return inline_functions(model) if self.options.portable else model

    def add_embedding(self, ids: str) -> str:
        """Add the embedding of token ids [B, T]."""
        rows = self.linears.add_lookup(ids, self.plan.matrices[EMBEDDING], EMBEDDED)
        return self.graph.to_float32(rows) if self.has_wide_residual else rows

    def add_layer(self, x: str, blocks: Blocks) -> str:
        """Add a layer to the hidden states x."""
        mixer, network, *norms = blocks
        for norm, part, name in zip(norms, (mixer, network), (None, LAYER_OUTPUT), strict=True):
            y = self.add_layer_block(self.add_layer_block(x, norm), part)
            output = name and name.format(layer=self.layer)
            x = self.graph.add("Add", x, self.graph.to_float32(y) if self.has_wide_residual else y, name=output)
        if self.has_wide_residual and self.graph.kind != TensorProto.FLOAT:
            # Declare the type, which is not that of activations.
            self.graph.values.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, None))
        return x

    def add_final_norm(self, x: str) -> str:
        """Add the final norm of hidden states x."""
        name, norm = self.architecture.final_norm
        normed: str = self.add_block(x, f"model.{name}", norm)
        return normed

    def add_layer_block(self, x: str, name: str) -> Any:
        """Add the current layer's block with this name, such as "self_attn"; return the names of its outputs."""
        return self.add_block(x, f"model.layers.{self.layer}.{name}", self.architecture.layers[self.layer][name])

    def add_block(self, x: str, prefix: str, block: Block) -> Any:
        """Add a block by calling its `export_function`, and return the names of its outputs."""
        return resolve_name(block.export_function)(self, x, prefix, block)

    def add_function(self, function: FunctionProto) -> None:
        """Add an ONNX function to the model unless the model has one with the same name."""
        self._functions.setdefault(function.name, function)

    def attention_attributes(self, window: int | None = None) -> AttentionAttributes:
        """Return an attention node's attributes.

        Args:
            window: number of newest keys that a query sees, or None if it sees all keys.
        """
        spec, options = self.spec, self.options
        return AttentionAttributes(
            num_pairs=spec.pairs,
            num_kv_pairs=spec.kv_pairs,
            generation=2 if spec.shared_k else 1,
            scale=spec.scale,
            do_rotary=int(spec.rope != "none"),
            # The rows of V1's projections are reordered so that channels which rotate together are neighbours.
            rotary_interleaved=int(spec.rope != "none" and (spec.rope == "interleaved" or not spec.shared_k)),
            local_window_size=window or -1,
            kv_bit_width=options.kv_bits if self.scales else 0,
            logit_bits=options.logits.bits if options.logits.quantizes else 0,
            logit_granularity=options.logits.granularity or "row",
            logit_shift=int(options.logits.has_transform("shift")),
            signals_per_noise=spec.signals_per_noise,
        )

    def add_attention_node(self, inputs: Sequence[str], present: Sequence[str], window: int | None = None) -> str:
        """Add the layer's node of the attention op, and return the name of its output.

        Args:
            present: names of its outputs for present keys and values.
            window: as in `attention_attributes`.
        """
        attended, attributes = f"layers.{self.layer}.attention", self.attention_attributes(window).to_dict()
        self.graph.add_with_outputs(NAME, inputs, [attended, *present], DOMAIN, **attributes)
        return attended

    def _attention_function(self) -> FunctionProto:
        """Return the function body of the attention op, which all attention nodes share; only their windows differ."""
        spec, options = self.spec, self.options
        attentions = [node for node in self.graph.nodes if (node.domain, node.op_type) == (DOMAIN, NAME)]
        # -1 if no node has a window.
        windows = (each.i for node in attentions for each in node.attribute if each.name == "local_window_size")
        attributes = replace(self.attention_attributes(), local_window_size=max(windows, default=-1))
        # Standard ops if GroupQueryAttention cannot compute it (quantized logits, unsupported widths).
        kind: BodyKind = "pure" if contrib_problems(attributes, spec.head_dim) else "contrib"
        present = {"signal_gate": spec.lam == "two-gates", "output_gate": spec.output_gate}
        gates = [name for name in GATES if present[name]]
        return make_function_body(kind, attributes, spec.head_dim, options.opset, options.cache, gates)

    def add_signal_gate_and_lam(self, x: str, prefix: str) -> tuple[str, str]:
        """Add the signal map's gate and λ, and return both names; the gate's is "" if the model has no gate.

        Both are float32 [B, T, h] for h pairs, except λ of DIFF V1, which is [1].
        """
        if self.spec.lam == "exp":
            return "", self.add_scalar_lam(prefix)
        weight = self.plan.read_small_matrix(f"{prefix}.lambda_proj.weight")
        x_float = self.graph.add("Cast", x, to=TensorProto.FLOAT)
        parts = {"lambda": weight}
        if self.spec.lam == "two-gates":
            parts = {"signal_gate": weight[0::2], "lambda": weight[1::2]}
        names = {}
        for name, rows in parts.items():
            constant = self.graph.constant(f"layers.{self.layer}.{name}_proj", rows.T.contiguous().numpy())
            names[name] = self.graph.add("Sigmoid", self.graph.add("MatMul", x_float, constant))
        return names.get("signal_gate", ""), names["lambda"]

    def add_scalar_lam(self, prefix: str) -> str:
        """Add λ of DIFF V1 as a constant, float32 [1]."""
        vectors = (self.plan.read_vector(f"{prefix}.{name}") for name in LAMBDA_VECTORS)
        lam = lam_from_vectors(*vectors, init=self.spec.lam_init(self.layer))
        return self.graph.constant(f"layers.{self.layer}.lambda", lam.reshape(1).numpy())

    def add_output_gate(self, x: str, prefix: str) -> str:
        """Add the gate [B, T, h·dv] of attention's output, for h pairs of width dv; return "" if there is no gate."""
        if not self.spec.output_gate:
            return ""
        name = f"layers.{self.layer}.output_gate_proj"
        weight = self.plan.read_small_matrix(f"{prefix}.output_gate_proj.weight")
        return self.graph.add(
            "Sigmoid", self.graph.add("MatMul", x, self.graph.typed_constant(name, weight.T.contiguous()))
        )

    def add_post_norm(self, attended: str, prefix: str) -> str:
        """Add the norm over each pair's output, with the factor (1 - λ_init) folded into its weight.

        Args:
            attended: name of attention's output [B, T, h·dv] for h pairs of width dv; returned if the model has no such
                norm.
            prefix: prefix of the names of attention's parameters.
        """
        spec, graph = self.spec, self.graph
        factor = spec.norm_factor(self.layer)
        if spec.post_norm == "none":
            return attended
        weight = torch.ones(spec.value_dim)
        if spec.post_norm == "affine":
            weight = self.plan.read_vector(f"{prefix}.subln.weight")
        by_pair = graph.int64("by_pair", (0, 0, spec.pairs, spec.value_dim))
        rows = graph.add("Reshape", attended, by_pair)
        scaled = graph.typed_constant(f"layers.{self.layer}.post_norm", weight * factor)
        normed = add_rms_norm(graph, rows, scaled, spec.post_norm_eps, self.options.opset)
        return graph.add("Reshape", normed, graph.int64("by_token", (0, 0, spec.pairs * spec.value_dim)))

    def add_linear(self, x: str, module: str) -> str:
        """Add the linear layer `module`, with its bias, and return the name of its output."""
        (y,) = self.add_linears(x, [module])
        return y

    def add_linears(self, x: str, modules: list[str]) -> list[str]:
        """Add linear layers with the same input x, with their biases, and return the names of their outputs."""
        products = self.linears.add_products(x, [self.plan.matrices[f"{module}.weight"] for module in modules])
        return [self._add_bias(y, f"{module}.bias") for y, module in zip(products, modules, strict=True)]

    def _add_bias(self, y: str, name: str) -> str:
        if name not in self.plan.parameters:
            return y
        return self.graph.add("Add", y, self.graph.typed_constant(name, self.plan.read_vector(name)))

    def add_past_inputs(self) -> list[str]:
        """Add the layer's past keys and values as inputs, and return their names, or "" twice if there is no cache."""
        if not self.options.cache:
            return ["", ""]
        names = [PAST.format(layer=self.layer, part=part) for part in ("key", "value")]
        return [self.graph.input(name, self.cache_kind, self._cache_shape("past")) for name in names]

    def add_present_outputs(self) -> list[str]:
        """Return the names of the layer's present keys and values, after making them outputs if there is a cache."""
        names = [PRESENT.format(layer=self.layer, part=part) for part in ("key", "value")]
        if self.options.cache:
            for name in names:
                self.graph.output(name, self.cache_kind, self._cache_shape("present"))
        return names

    def _cache_shape(self, rows: str) -> list[str | int]:
        width = cached_key_width(self.spec)
        return ["batch_size", self.spec.kv_pairs, rows, width // 2 if self.cache_kind == TensorProto.UINT8 else width]

    def add_cache_scales(self) -> list[str]:
        """Add the scales of the layer's keys and values; return an empty list if the cache is not quantized."""
        if not self.scales:
            return []
        names = (f"layers.{self.layer}.k_scale", f"layers.{self.layer}.v_scale")
        return [self.graph.constant(n, value) for n, value in zip(names, self.scales[self.layer], strict=True)]
