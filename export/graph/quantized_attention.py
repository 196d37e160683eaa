"""The op `diffquant::QuantizedAttention`, version 2: a plain Transformer's attention over a KV cache of codes.

docs/differential-attention-op.md is the specification; a test keeps its tables and this schema alike.
"""

from onnx import FunctionProto, parser
from onnx.defs import OpSchema

from diffquant.export.graph.contrib_cache import bounded_rows
from diffquant.export.graph.op import CONTRIB, DOMAIN, VERSION, parameter

QUANTIZED_ATTENTION = "QuantizedAttention"


# Whole numbers that GroupQueryAttention has by the same names.
_COPIED = ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size")
_ATTRIBUTES = dict.fromkeys((*_COPIED, "kv_bit_width"), OpSchema.AttrType.INT) | {"scale": OpSchema.AttrType.FLOAT}


def quantized_attention_schema() -> OpSchema:
    """The op's schema as onnx describes ops."""
    return OpSchema(
        QUANTIZED_ATTENTION,
        DOMAIN,
        VERSION,
        doc="softmax(Q·Kᵀ·scale)·V, causal, over a KV cache of codes that it extends.",
        inputs=[
            parameter("query", "T", "[B, T, h·d]"),
            parameter("key", "T", "[B, T, h_kv·d]"),
            parameter("value", "T", "[B, T, h_kv·d]"),
            parameter("past_key", "TC", "[B, h_kv, P, d·c]"),
            parameter("past_value", "TC", "[B, h_kv, P, d·c]"),
            parameter("seqlens_k", "TI", "[B]"),
            parameter("total_sequence_length", "TI", "scalar"),
            parameter("cos_cache", "T", "[positions, d/2]", optional=True),
            parameter("sin_cache", "T", "[positions, d/2]", optional=True),
            parameter("k_scale", "TL", "[1, h_kv, 1, d]"),
            parameter("v_scale", "TL", "[1, h_kv, 1, d]"),
        ],
        outputs=[
            parameter("output", "T", "[B, T, h·d]"),
            parameter("present_key", "TC", "[B, h_kv, max(P, total_sequence_length), d·c]"),
            parameter("present_value", "TC", "[B, h_kv, max(P, total_sequence_length), d·c]"),
        ],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)"], "Activations."),
            ("TC", ["tensor(int8)", "tensor(uint8)"], "KV cache."),
            ("TL", ["tensor(float)"], "Scales."),
            ("TI", ["tensor(int32)"], "Lengths."),
        ],
        attributes=[OpSchema.Attribute(name, kind, "", required=True) for name, kind in _ATTRIBUTES.items()],
    )


def quantized_attention_function(opset: int, bits: int, rotates: bool) -> FunctionProto:
    """The op as an ONNX function, which is one GroupQueryAttention of ONNX Runtime.

    Args:
        opset: version of the standard domain, that of the model.
        bits: `kv_bit_width` of the nodes that will use it.
        rotates: their `do_rotary`.
    """
    op = quantized_attention_schema()
    inputs, outputs = (", ".join(each.name for each in parameters) for parameters in (op.inputs, op.outputs))
    return parser.parse_function(
        f'<opset_import: ["" : {opset}, "{CONTRIB}" : 1], domain: "{DOMAIN}">\n'
        f"{QUANTIZED_ATTENTION} <{', '.join(_ATTRIBUTES)}> ({inputs}) => ({outputs})\n"
        f"{{\n{bounded_rows('query', bits, rotates)}\n{_TEXT}\n}}"
    )


_OPTIONS = [
    *(f"{name}: int = @{name}" for name in _COPIED if "rota" not in name),
    "scale: float = @scale",
    "kv_cache_bit_width: int = @kv_bit_width",
    'k_quant_type = "PER_CHANNEL"',
    'v_quant_type = "PER_CHANNEL"',
]
_TEXT = f"""   output, present_key, present_value = {CONTRIB}.GroupQueryAttention <{", ".join(_OPTIONS)}> (
      query_turned, key_bounded, value_bounded, past_key, past_value, seqlens_k, total_sequence_length, , , , , ,
      k_scale, v_scale)"""
