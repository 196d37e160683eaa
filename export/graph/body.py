"""Function bodies of the attention op, which ONNX Runtime runs if no native kernel is loaded.

A body is made for one head width and one set of attributes; only the window may differ between nodes. The body in
standard ops is in `pure.py`.
"""

from collections.abc import Collection
from typing import Literal

from onnx import FunctionProto

from diffquant.errors import UsageError
from diffquant.onnx.graph.op import CONTRIB, SIGNATURE, AttentionAttributes, make_function
from diffquant.onnx.graph.ops import rope_and_clip_text
from diffquant.onnx.graph.pure import standard_ops_text

BodyKind = Literal["contrib", "pure"]
# The only attribute that may differ between layers.
_WINDOW = "local_window_size: int = @local_window_size"


def make_function_body(
    kind: BodyKind,
    attributes: AttentionAttributes,
    width: int,
    opset: int,
    cached: bool = True,
    gates: Collection[str] = (),
) -> FunctionProto:
    """Return the function body of the differential-attention op.

    Args:
        kind: "contrib" (one node of ONNX Runtime's GroupQueryAttention) or "pure" (only standard ops).
        attributes: attributes of the nodes that will use the body; if their windows differ, with the widest one.
        width: width d of a query head.
        opset: the model's version of the standard ONNX domain, 18 or later.
        cached: whether nodes have past keys and values as inputs.
        gates: gates that nodes have as inputs: "signal_gate", "output_gate", both or none.

    Raises:
        UsageError: the kind cannot compute these attributes, or the cache is quantized and `cached` is false.
    """
    if attributes.kv_bit_width and not cached:
        raise UsageError(f"a {attributes.kv_bit_width}-bit cache needs past_key and past_value as inputs")
    is_contrib = kind == "contrib"
    problems = contrib_problems(attributes, width) if is_contrib else []
    if problems:
        raise UsageError(
            f"ONNX Runtime's GroupQueryAttention cannot compute this: {'; '.join(problems)}; the body kind 'pure' can"
        )
    text = contrib_text(attributes, width, gates) if is_contrib else standard_ops_text(attributes, width, cached, gates)
    return make_function(SIGNATURE, text, opset, attributes.to_dict(), is_contrib)


def contrib_text(attributes: AttentionAttributes, width: int, gates: Collection[str] = ()) -> str:
    """Return the nodes of the "contrib" body as text in onnx's syntax.

    In generation 1, a key row holds the keys of both maps, k1|k2. Queries are padded with zeros to [q1|0] and [0|q2],
    so that each is multiplied only by the keys of its own map.

    Args:
        attributes: attributes of the nodes that will use the body.
        width: width of a query head.
        gates: gates that nodes have as inputs: "signal_gate", "output_gate", both or none.
    """
    pairs, noises, signals = attributes.num_pairs, attributes.num_noise_heads, attributes.signals_per_noise
    value_width = 2 * width if attributes.generation == 1 else width
    options: dict[str, str | float] = {
        "num_heads": attributes.query_heads,
        "kv_num_heads": attributes.num_kv_pairs,
        "scale": float(attributes.scale),
    }
    cache = "past_key, past_value, seqlens_k, total_sequence_length"
    queries = _masked_queries(attributes, width) if attributes.generation == 1 else "   heads = Identity (query)"
    if attributes.kv_bit_width:
        queries += "\n" + rope_and_clip_text("heads", attributes.kv_bit_width, bool(attributes.do_rotary))
        inputs = f"heads_turned, key_bounded, value_bounded, {cache}, , , , , , k_scale, v_scale"
        # Written only if used: ONNX Runtime before 1.27 does not support them.
        options["kv_cache_bit_width"] = attributes.kv_bit_width
        options["k_quant_type"] = options["v_quant_type"] = '"PER_CHANNEL"'
    else:
        options |= {"do_rotary": attributes.do_rotary, "rotary_interleaved": attributes.rotary_interleaved}
        inputs = f"heads, key, value, {cache}, cos_cache, sin_cache"
    listed = ", ".join([*(f"{name} = {value}" for name, value in options.items()), _WINDOW])
    gated = "Mul (signal, signal_gate_spread)" if "signal_gate" in gates else "Identity (signal)"
    spread = _by_group("lambda", pairs, noises, signals)
    if "signal_gate" in gates:
        spread += "\n" + _by_group("signal_gate", pairs, noises, signals)
    rows = "Mul (rows_out, output_gate)" if "output_gate" in gates else "Identity (rows_out)"
    return f"""{queries}
   both, present_key, present_value = {CONTRIB}.GroupQueryAttention <{listed}> ({inputs})
   by_noise = Constant <value = int64[5] {{0, 0, {noises}, {signals + 1}, {value_width}}}> ()
   by_row = Constant <value = int64[3] {{0, 0, {pairs * value_width}}}> ()
   parts = Constant <value = int64[2] {{{signals}, 1}}> ()
   maps = Reshape (both, by_noise)
   signal, noise = Split <axis = 3> (maps, parts)
{spread}
   gated = {gated}
   subtracted = Mul (noise, lambda_spread)
   difference = Sub (gated, subtracted)
   rows_out = Reshape (difference, by_row)
   output = {rows}"""


def _by_group(name: str, pairs: int, noises: int, signals: int) -> str:
    """Return nodes, as text, that expand a value [1] or [B, T, h] to {name}_spread [B or 1, T or 1, n, r, 1]."""
    return f"""   {name}_pairs = Constant <value = int64[3] {{1, 1, {pairs}}}> ()
   {name}_groups = Constant <value = int64[5] {{0, 0, {noises}, {signals}, 1}}> ()
   {name}_typed = CastLike ({name}, query)
   {name}_each = Expand ({name}_typed, {name}_pairs)
   {name}_spread = Reshape ({name}_each, {name}_groups)"""


def _masked_queries(attributes: AttentionAttributes, width: int) -> str:
    """Return nodes, as text, that compute `heads`: signal heads padded to [q|0], noise heads to [0|q]."""
    signals, noises = attributes.signals_per_noise, attributes.num_noise_heads
    mask = ", ".join(["1, 0"] * signals + ["0, 1"])
    return f"""   one_each = Constant <value = int64[6] {{0, 0, {noises}, {signals + 1}, 1, {width}}}> ()
   flat = Constant <value = int64[3] {{0, 0, {attributes.query_heads * 2 * width}}}> ()
   own_half = Constant <value = float[{signals + 1}, 2, 1] {{{mask}}}> ()
   own_half_typed = CastLike (own_half, query)
   rows = Reshape (query, one_each)
   halves = Mul (rows, own_half_typed)
   heads = Reshape (halves, flat)"""


def contrib_problems(attributes: AttentionAttributes, width: int) -> list[str]:
    """Return the reasons why GroupQueryAttention cannot compute the op; empty if it can.

    Args:
        width: width of a query head.
    """
    row = 2 * width if attributes.generation == 1 else width
    problems = contrib_width_problems(row, bool(attributes.do_rotary))
    if attributes.logit_bits:
        problems.append("it keeps logits inside its kernel and cannot quantize them")
    if attributes.kv_bit_width == 6:
        problems.append("it supports caches of 8 and 4 bits, not 6")
    return problems


def contrib_width_problems(row: int, rotates: bool) -> list[str]:
    """Return the reasons why GroupQueryAttention does not support a width of key rows; empty if it does.

    Args:
        row: number of channels of a key row.
        rotates: whether queries and keys are rotated (RoPE).
    """
    multiple = 16 if rotates else 8
    return [f"its key rows must have a multiple of {multiple} channels, not {row}"] if row % multiple else []
