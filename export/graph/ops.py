"""Further ops of the domain `diffquant`, version 2: quantized matmul, Transformer attention, and Mamba's two ops.

docs/differential-attention-op.md is the specification; a test compares it with these signatures. ONNX Runtime's
GroupQueryAttention would store values below a channel's range as -2^(b-1), a code that the cache's format lacks. The
function bodies therefore rotate keys first, and then clip keys and values from below.
"""

from onnx import FunctionProto, TensorProto

from diffquant.onnx.graph.op import CONTRIB, make_function

MATMUL = "MatMulNBits"
# Integer attributes, named as in ONNX Runtime's op.
ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")


def matmul_function(opset: int) -> FunctionProto:
    """Return the function body of MatMulNBits: one node of ONNX Runtime's op with the same name.

    Args:
        opset: the model's version of the standard ONNX domain.
    """
    copied = ", ".join(f"{name}: int = @{name}" for name in ATTRIBUTES)
    text = f"   Y = {CONTRIB}.{MATMUL} <{copied}> (A, B, scales)"
    return make_function(f"{MATMUL} (A, B, scales) => (Y)", text, opset, ATTRIBUTES, has_contrib=True)


_POSITIONS = f"""   new = Shape <start = 1, end = 2> (query)
   c0 = Constant <value = int64[1] {{0}}> ()
   c1 = Constant <value = int64[1] {{1}}> ()
   s0 = Constant <value = int64 {{0}}> ()
   s1 = Constant <value = int64 {{1}}> ()
   new_s = Squeeze (new)
   last = Cast <to = {TensorProto.INT64}> (seqlens_k)
   tokens = Add (last, c1)
   before = Sub (tokens, new)
   start = Max (before, c0)
   start_column = Unsqueeze (start, c1)
   steps = Range (s0, new_s, s1)
   position = Add (start_column, steps)"""


def rope_and_clip_text(heads: str, bits: int, rotates: bool) -> str:
    """Return nodes, as text, that apply RoPE to queries and keys, and raise low keys and values to the lowest code.

    The inputs are {heads}, key and value, [B, T, width] each. The outputs are {heads}_turned, key_bounded and
    value_bounded.

    Args:
        heads: name of the queries, whose heads are as wide as key rows.
        bits: width of the cache's codes.
        rotates: whether queries and keys are rotated (RoPE).
    """
    names = (heads, "key")
    if rotates:
        turned = f"{CONTRIB}.RotaryEmbedding <interleaved: int = @rotary_interleaved>"
        parts = [_POSITIONS, *(f"   {x}_turned = {turned} ({x}, position, cos_cache, sin_cache)" for x in names)]
    else:
        parts = [f"   {x}_turned = Identity ({x})" for x in names]
    parts.append(f"""   lowest = Constant <value = float {{{1 - 2 ** (bits - 1)}.0}}> ()
   as_row = Constant <value = int64[3] {{1, 1, -1}}> ()""")
    parts += [
        f"""   {name}_range = Mul ({scale}, lowest)
   {name}_range_row = Reshape ({name}_range, as_row)
   {name}_range_typed = CastLike ({name}_range_row, {name})
   {name}_bounded = Max ({rows}, {name}_range_typed)"""
        for name, scale, rows in (("key", "k_scale", "key_turned"), ("value", "v_scale", "value"))
    ]
    return "\n".join(parts)


QUANTIZED_ATTENTION = "QuantizedAttention"


_ATTRIBUTES = (
    "num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "local_window_size", "kv_bit_width", "scale",
)  # fmt: skip
_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "k_scale", "v_scale",
)  # fmt: skip
_SIGNATURE = f"{QUANTIZED_ATTENTION} ({', '.join(_INPUTS)}) => (output, present_key, present_value)"


def quantized_attention_function(opset: int, bits: int, rotates: bool) -> FunctionProto:
    """Return the function body of QuantizedAttention: RoPE and clipping, then ONNX Runtime's GroupQueryAttention.

    Args:
        opset: the model's version of the standard ONNX domain.
        bits: width of the cache's codes, the nodes' attribute `kv_bit_width`.
        rotates: whether queries and keys are rotated (RoPE), the nodes' attribute `do_rotary`.
    """
    text = f"{rope_and_clip_text('query', bits, rotates)}\n{_TEXT}"
    return make_function(_SIGNATURE, text, opset, _ATTRIBUTES, has_contrib=True)


_TEXT = f"""   output, present_key, present_value = {CONTRIB}.GroupQueryAttention <
      num_heads: int = @num_heads, kv_num_heads: int = @kv_num_heads, local_window_size: int = @local_window_size,
      scale: float = @scale, kv_cache_bit_width: int = @kv_bit_width,
      k_quant_type = "PER_CHANNEL", v_quant_type = "PER_CHANNEL"> (
      query_turned, key_bounded, value_bounded, past_key, past_value, seqlens_k, total_sequence_length, , , , , ,
      k_scale, v_scale)"""


CAUSAL_CONVOLUTION, SELECTIVE_SCAN = "CausalConvolution", "SelectiveScan"


def causal_convolution_function(width: int, opset: int) -> FunctionProto:
    """Return the function body of CausalConvolution: a multiply-add for each of the convolution's taps.

    Args:
        width: number W of taps.
        opset: the model's version of the standard ONNX domain.
    """
    return make_function(
        f"{CAUSAL_CONVOLUTION} (u, weight, bias, counts, past_state) => (y, present_state)",
        _convolution_text(width),
        opset,
    )


def selective_scan_function(opset: int) -> FunctionProto:
    """Return the function body of SelectiveScan: one Scan over the tokens.

    Args:
        opset: the model's version of the standard ONNX domain.
    """
    return make_function(f"{SELECTIVE_SCAN} (u, step, A, B, C, D, past_state) => (y, present_state)", _SCAN_TEXT, opset)


def _convolution_text(width: int) -> str:
    taps = "\n".join(
        f"""   first_{tap} = Constant <value = int64[1] {{{tap}}}> ()
   last_{tap} = Add (length, first_{tap})
   inputs_{tap} = Slice (inputs, first_{tap}, last_{tap}, axis)
   weight_{tap} = Gather (weight, first_{tap})
   tap_{tap} = Mul (inputs_{tap}, weight_{tap})"""
        for tap in range(width)
    )
    sums = "\n".join(f"   sum_{tap} = Add ({f'sum_{tap - 1}' if tap else 'bias'}, tap_{tap})" for tap in range(width))
    return f"""   axis = Constant <value = int64[1] {{1}}> ()
   length = Shape <start = 1, end = 2> (u)
   inputs = Concat <axis = 1> (past_state, u)
{taps}
{sums}
   y = Identity (sum_{width - 1})
   zero = Constant <value = int64 {{0}}> ()
   kept = Constant <value = int64 {{{width - 1}}}> ()
   one = Constant <value = int64 {{1}}> ()
   behind = Constant <value = int64[1] {{2}}> ()
   places = Range (zero, kept, one)
   starts = Unsqueeze (counts, axis)
   rows = Add (starts, places)
   index = Unsqueeze (rows, behind)
   present_state = GatherND <batch_dims = 1> (inputs, index)"""


# Scan runs over the first axis, the only one that onnx's reference evaluator supports.
_SCAN_TEXT = """   fed = Mul (step, u)
   step_turned = Transpose <perm = [1, 0, 2]> (step)
   fed_turned = Transpose <perm = [1, 0, 2]> (fed)
   into_turned = Transpose <perm = [1, 0, 2]> (B)
   out_turned = Transpose <perm = [1, 0, 2]> (C)
   present_state, rows = Scan <num_scan_inputs = 4, body = token (
      float[b, e, n] state, float[b, e] one_step, float[b, e] one_fed, float[b, n] one_into, float[b, n] one_out
   ) => (float[b, e, n] next, float[b, e] read) {
      last_axis = Constant <value = int64[1] {-1}> ()
      middle_axis = Constant <value = int64[1] {1}> ()
      step_column = Unsqueeze (one_step, last_axis)
      exponent = Mul (step_column, A)
      decay = Exp (exponent)
      decayed = Mul (decay, state)
      fed_column = Unsqueeze (one_fed, last_axis)
      into_row = Unsqueeze (one_into, middle_axis)
      added = Mul (fed_column, into_row)
      next = Add (decayed, added)
      out_column = Unsqueeze (one_out, last_axis)
      read_column = MatMul (next, out_column)
      read = Squeeze (read_column, last_axis)
   }> (past_state, step_turned, fed_turned, into_turned, out_turned)
   read_turned = Transpose <perm = [1, 0, 2]> (rows)
   skipped = Mul (D, u)
   y = Add (read_turned, skipped)"""
