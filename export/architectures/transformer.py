"""Export of Transformers and DIFF Transformers: their attention, gated MLP and RMSNorm, and the outputs for maps.

In functions that add a block, `x` is the name of its input [B, T, D], and names of its parameters start with `prefix`.
"""

import torch
from onnx import TensorProto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffquant.family.heads import PROJECTIONS
from diffquant.model.blocks import AttentionBlock, MLPBlock, RMSNormBlock
from diffquant.onnx.graph.decoder import Decoder
from diffquant.onnx.graph.nodes import EMITTED, add_rms_norm
from diffquant.onnx.graph.op import CONTRIB, DOMAIN
from diffquant.onnx.graph.ops import QUANTIZED_ATTENTION
from diffquant.onnx.graph.plan import cached_key_width
from diffquant.onnx.verification.reference import Reference

# Extra outputs from which a web page computes attention maps. The cache has the rotated keys, so that each map's
# softmax(Q·Kᵀ·scale) needs nothing else.
QUERY = "maps.{layer}.query"
LAMBDA = "maps.{layer}.lambda"
SIGNAL_GATE = "maps.{layer}.signal_gate"
_ANGLES = "maps.angles"


class TransformerDecoder(Decoder):
    """Builds the ONNX graph of a Transformer or DIFF Transformer, with one attention node per layer."""

    reference_class = Reference

    def add_all_nodes(self) -> None:
        super().add_all_nodes()
        if self.options.web:
            _declare_maps(self)


def add_norm(decoder: Decoder, x: str, prefix: str, block: RMSNormBlock) -> str:
    """Add an RMSNorm, and return its output's name."""
    weight = decoder.graph.typed_constant(f"{prefix}.weight", decoder.plan.read_vector(f"{prefix}.weight"))
    return add_rms_norm(decoder.graph, x, weight, block.eps, decoder.options.opset)


def add_mlp(decoder: Decoder, x: str, prefix: str, block: MLPBlock) -> str:
    """Add a gated MLP, and return its output's name."""
    graph, plan = decoder.graph, decoder.plan
    gate, up = decoder.add_linears(x, [f"{prefix}.gate_proj", f"{prefix}.up_proj"])
    own = [name for name in plan.parameters if name.startswith(f"{prefix}.act_fn.")]
    parameters = {name.rpartition(".")[2]: graph.constant(name, plan.read_vector(name).numpy()) for name in own}
    active = EMITTED[block.activation](graph, gate, parameters)
    return decoder.add_linear(graph.add("Mul", active, up), f"{prefix}.down_proj")


def add_attention(decoder: Decoder, x: str, prefix: str, block: AttentionBlock) -> str:
    """Add attention with its projections, and return its output's name.

    In a DIFF Transformer, the node is diffquant's DifferentialAttention. In a Transformer, it is ONNX Runtime's
    GroupQueryAttention, or diffquant's QuantizedAttention if the cache is quantized.
    """
    graph, spec = decoder.graph, block.spec
    q, k, v = decoder.add_linears(x, [f"{prefix}.{name}" for name in PROJECTIONS])
    past, present = decoder.add_past_inputs(), decoder.add_present_outputs()
    tables = _tables(decoder) if spec.rope != "none" else ["", ""]
    scales = decoder.add_cache_scales()
    if spec.maps == 1:
        attended = f"layers.{block.layer}.attention"
        inputs = [q, k, v, *past, *decoder.tokens.lengths, *tables]
        _plain_attention(decoder, inputs, scales, [attended, *present])
        if gate := decoder.add_output_gate(x, prefix):
            attended = graph.add("Mul", attended, gate)
    else:
        # onnx's reference evaluator needs "" for each absent input of a function, up to the last one.
        signal_gate, lam = decoder.add_signal_gate_and_lam(x, prefix)
        gates = [signal_gate, decoder.add_output_gate(x, prefix)]
        inputs = [q, k, v, lam, *past, *decoder.tokens.lengths, *tables, *(scales or ["", ""]), *gates]
        attended = decoder.add_attention_node(inputs, present)
        if decoder.options.web:
            values = {QUERY: _rotate_queries(decoder, q, tables), LAMBDA: lam, SIGNAL_GATE: signal_gate}
            for name, value in values.items():
                if value:
                    graph.add("Identity", value, name=name.format(layer=block.layer))
    return decoder.add_linear(decoder.add_post_norm(attended, prefix), f"{prefix}.o_proj")


def _plain_attention(decoder: Decoder, inputs: list[str], scales: list[str], outputs: list[str]) -> None:
    """Add a Transformer's attention: GroupQueryAttention, or `QUANTIZED_ATTENTION` if the cache is quantized."""
    spec = decoder.spec
    attributes: dict[str, float | int] = {
        "num_heads": spec.pairs,
        "kv_num_heads": spec.kv_pairs,
        "scale": spec.scale,
        "do_rotary": int(spec.rope != "none"),
        "rotary_interleaved": int(spec.rope == "interleaved"),
        "local_window_size": -1,
    }
    if scales:
        attributes["kv_bit_width"] = decoder.options.kv_bits
        decoder.graph.add_with_outputs(QUANTIZED_ATTENTION, [*inputs, *scales], outputs, DOMAIN, **attributes)
        return
    while not inputs[-1]:
        inputs = inputs[:-1]
    decoder.graph.add_with_outputs("GroupQueryAttention", inputs, outputs, CONTRIB, **attributes)


def _tables(decoder: Decoder) -> list[str]:
    """Add the RoPE tables as constants once, with a column per channel pair of a key row, and return their names."""
    names, spec = ["cos_cache", "sin_cache"], decoder.spec
    if names[0] not in decoder.graph.constants:
        positions = torch.arange(decoder.config.max_position_embeddings)[None]
        tables = LlamaRotaryEmbedding(decoder.config)(torch.zeros(1), position_ids=positions)
        keys_of_pair = cached_key_width(spec) // spec.head_dim
        for name, table in zip(names, tables, strict=True):
            decoder.graph.typed_constant(name, table[0, :, : spec.head_dim // 2].repeat(1, keys_of_pair))
    return names


def _declare_maps(decoder: Decoder) -> None:
    """Make queries, λ and signal gates outputs of the model, behind all others."""
    graph, spec = decoder.graph, decoder.spec
    by_token: list[str | int] = ["batch_size", "sequence", spec.pairs]
    for layer in range(decoder.config.num_hidden_layers):
        width = spec.query_heads * spec.head_dim
        graph.output(QUERY.format(layer=layer), graph.kind, ["batch_size", "sequence", width])
        graph.output(LAMBDA.format(layer=layer), TensorProto.FLOAT, [1] if spec.lam == "exp" else by_token)
        if spec.lam == "two-gates":
            graph.output(SIGNAL_GATE.format(layer=layer), TensorProto.FLOAT, by_token)


def _rotate_queries(decoder: Decoder, query: str, tables: list[str]) -> str:
    """Add the rotation of the op's queries [B, T, (h+n)·d], and return the result's name; padding comes last."""
    spec = decoder.spec
    if spec.rope == "none":
        return query
    if _ANGLES not in decoder.shared_values:
        decoder.shared_values[_ANGLES] = [_angles_of_tokens(decoder, table) for table in tables]
    is_interleaved = decoder.attention_attributes().rotary_interleaved
    angles = decoder.shared_values[_ANGLES]
    return decoder.graph.add("RotaryEmbedding", query, *angles, num_heads=spec.query_heads, interleaved=is_interleaved)


def _angles_of_tokens(decoder: Decoder, table: str) -> str:
    """Add a lookup of a table's rows [B, T, d/2] at the new tokens' positions, and return its name."""
    graph, tokens = decoder.graph, decoder.tokens
    width = graph.int64("maps.half_width", (decoder.spec.head_dim // 2,))
    zero = graph.int64("maps.zero", (0,))
    # In V1 the table is for key rows k1|k2, so it has the same angles twice.
    columns = graph.add("Slice", table, zero, width, graph.int64("maps.columns", (1,)))
    return graph.add("Gather", columns, graph.add("Add", tokens.before, tokens.steps))
