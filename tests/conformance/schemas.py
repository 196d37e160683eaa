"""ONNX schemas of the ops of the domain `diffquant`, version 2, as docs/differential-attention-op.md specifies them."""

from onnx.defs import OpSchema

from diffquant.onnx.graph.op import DOMAIN, NAME, VERSION, AttentionAttributes
from diffquant.onnx.graph.ops import ATTRIBUTES, CAUSAL_CONVOLUTION, MATMUL, QUANTIZED_ATTENTION, SELECTIVE_SCAN

_INTEGERS = ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size", "kv_bit_width")
_OF_QUANTIZED = dict.fromkeys(_INTEGERS, OpSchema.AttrType.INT) | {"scale": OpSchema.AttrType.FLOAT}


def schema() -> OpSchema:
    """Return the ONNX schema of `diffquant::DifferentialAttention`."""
    return OpSchema(
        NAME,
        DOMAIN,
        VERSION,
        doc="gate·softmax(Q1·K1ᵀ·scale)·V - λ·softmax(Q2·K2ᵀ·scale)·V, causal, over a KV cache that it extends.",
        inputs=[
            parameter("query", "T", "[B, T, (h+n)·d]"),
            parameter("key", "T", "[B, T, h_kv·dk]"),
            parameter("value", "T", "[B, T, h_kv·dv]"),
            parameter("lambda", "TL", "[1] or [B, T, h]"),
            parameter("past_key", "TC", "[B, h_kv, P, dk·c]", optional=True),
            parameter("past_value", "TC", "[B, h_kv, P, dv·c]", optional=True),
            parameter("seqlens_k", "TI", "[B]"),
            parameter("total_sequence_length", "TI", "scalar"),
            parameter("cos_cache", "T", "[positions, dk/2]", optional=True),
            parameter("sin_cache", "T", "[positions, dk/2]", optional=True),
            parameter("k_scale", "TL", "[1, h_kv, 1, dk]", optional=True),
            parameter("v_scale", "TL", "[1, h_kv, 1, dv]", optional=True),
            parameter("signal_gate", "TL", "[1] or [B, T, h]", optional=True),
            parameter("output_gate", "T", "[B, T, h·dv]", optional=True),
        ],
        outputs=[
            parameter("output", "T", "[B, T, h·dv]"),
            parameter("present_key", "TC", "[B, h_kv, max(P, total_sequence_length), dk·c]"),
            parameter("present_value", "TC", "[B, h_kv, max(P, total_sequence_length), dv·c]"),
        ],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)"], "Activations."),
            ("TC", ["tensor(float)", "tensor(float16)", "tensor(int8)", "tensor(uint8)"], "KV cache."),
            ("TL", ["tensor(float)"], "λ, the signal's gate and scales."),
            ("TI", ["tensor(int32)"], "Lengths."),
        ],
        attributes=[OpSchema.Attribute(name, kind, "", required=True) for name, kind in attribute_types().items()],
    )


def attribute_types() -> dict[str, OpSchema.AttrType]:
    """Return the type of each attribute by name, in order."""
    kinds = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT, str: OpSchema.AttrType.STRING}
    return {name: kinds[kind] for name, kind in AttentionAttributes.__annotations__.items()}


def matmul_schema() -> OpSchema:
    """Return the ONNX schema of `diffquant::MatMulNBits`."""
    return OpSchema(
        MATMUL,
        DOMAIN,
        VERSION,
        doc="A·(codes - 2^(bits-1))ᵀ·scales, with A rounded to int8 by blocks of columns.",
        inputs=[
            parameter("A", "T", "[..., K]"),
            parameter("B", "TB", "[N, ⌈K / block_size⌉, block_size·bits / 8]"),
            parameter("scales", "T", "[N, ⌈K / block_size⌉]"),
        ],
        outputs=[parameter("Y", "T", "[..., N]")],
        type_constraints=[
            ("T", ["tensor(float)"], "Activations and scales."),
            ("TB", ["tensor(uint8)"], "Codes."),
        ],
        attributes=[OpSchema.Attribute(name, OpSchema.AttrType.INT, "", required=True) for name in ATTRIBUTES],
    )


def quantized_attention_schema() -> OpSchema:
    """Return the ONNX schema of `diffquant::QuantizedAttention`."""
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
        attributes=[OpSchema.Attribute(name, kind, "", required=True) for name, kind in _OF_QUANTIZED.items()],
    )


def causal_convolution_schema() -> OpSchema:
    """Return the ONNX schema of `diffquant::CausalConvolution`."""
    return OpSchema(
        CAUSAL_CONVOLUTION,
        DOMAIN,
        VERSION,
        doc="Each channel's convolution over a token and the W - 1 before it; past_state holds those of earlier calls.",
        inputs=[
            parameter("u", "T", "[B, T, E]"),
            parameter("weight", "T", "[W, E]"),
            parameter("bias", "T", "[E]"),
            parameter("counts", "TI", "[B]"),
            parameter("past_state", "T", "[B, W-1, E]"),
        ],
        outputs=[parameter("y", "T", "[B, T, E]"), parameter("present_state", "T", "[B, W-1, E]")],
        type_constraints=[
            ("T", ["tensor(float)", "tensor(float16)"], "Activations."),
            ("TI", ["tensor(int64)"], "Numbers of new tokens, behind which u is padding."),
        ],
    )


def selective_scan_schema() -> OpSchema:
    """Return the ONNX schema of `diffquant::SelectiveScan`."""
    return OpSchema(
        SELECTIVE_SCAN,
        DOMAIN,
        VERSION,
        doc="h = exp(Δ·A)∘h + Δ·B·u and y = C·h + D∘u, a token after the other. Where Δ is 0, h stays.",
        inputs=[
            parameter("u", "T", "[B, T, E]"),
            parameter("step", "T", "[B, T, E]"),
            parameter("A", "T", "[E, N]"),
            parameter("B", "T", "[B, T, N]"),
            parameter("C", "T", "[B, T, N]"),
            parameter("D", "T", "[E]"),
            parameter("past_state", "T", "[B, E, N]"),
        ],
        outputs=[parameter("y", "T", "[B, T, E]"), parameter("present_state", "T", "[B, E, N]")],
        type_constraints=[("T", ["tensor(float)"], "All values.")],
    )


def signature_of(op: OpSchema) -> str:
    """Return an op's name, inputs and outputs as `make_function` needs them: "Op (x) => (y)"."""
    inputs, outputs = (", ".join(each.name for each in parameters) for parameters in (op.inputs, op.outputs))
    return f"{op.name} ({inputs}) => ({outputs})"


def parameter(name: str, kind: str, shape: str, optional: bool = False) -> OpSchema.FormalParameter:
    """Return an input or output of an op, with its type constraint and its shape as in the specification."""
    option = OpSchema.FormalParameterOption.Optional if optional else OpSchema.FormalParameterOption.Single
    return OpSchema.FormalParameter(name, kind, shape, param_option=option)
