"""Function bodies of the op, which compute it if no native kernel is loaded.

A body is written for one set of attributes, but for the window, and one head width; `pure.py` holds the one in standard
ops.
"""

from collections.abc import Collection
from typing import Literal

from onnx import FunctionProto, parser

from diffquant.errors import UsageError
from diffquant.export.graph.contrib_cache import bounded_rows
from diffquant.export.graph.op import DOMAIN, NAME, OpAttributes, schema
from diffquant.export.graph.pure import pure_text

CONTRIB = "com.microsoft"
BodyKind = Literal["contrib", "pure"]
# Layers differ in it, and in no other attribute.
_WINDOW = "local_window_size: int = @local_window_size"


def body(
    kind: BodyKind,
    attributes: OpAttributes,
    width: int,
    opset: int,
    cached: bool = True,
    gates: Collection[str] = (),
) -> FunctionProto:
    """The op as an ONNX function that computes it.

    Args:
        kind: "contrib" (one GroupQueryAttention of ONNX Runtime) or "pure" (standard ops alone).
        attributes: attributes of every node that will use it. Their windows may differ, of which this is the widest.
        width: d, width of a query.
        opset: the model's version of the standard domain, 18 or later.
        cached: whether nodes have a past.
        gates: those of `GATES` that nodes have.

    Raises:
        UsageError: the kind cannot compute these attributes, or a quantized cache has no past.
    """
    if attributes.kv_bit_width and not cached:
        raise UsageError(f"a {attributes.kv_bit_width}-bit cache needs past_key and past_value, which tell its type")
    is_contrib = kind == "contrib"
    problems = contrib_problems(attributes, width) if is_contrib else []
    if problems:
        raise UsageError(f"ONNX Runtime's GroupQueryAttention: {'; '.join(problems)}; use the pure body")
    text = contrib_text(attributes, width, gates) if is_contrib else pure_text(attributes, width, cached, gates)
    domains = [f'"" : {opset}'] + ([f'"{CONTRIB}" : 1'] if is_contrib else [])
    inputs = ", ".join(p.name for p in schema().inputs)
    outputs = ", ".join(p.name for p in schema().outputs)
    return parser.parse_function(
        f'<opset_import: [{", ".join(domains)}], domain: "{DOMAIN}">\n'
        f"{NAME} <{', '.join(attributes.to_dict())}> ({inputs}) => ({outputs})\n{{\n{text}\n}}"
    )


def contrib_text(attributes: OpAttributes, width: int, gates: Collection[str] = ()) -> str:
    """Nodes of the contrib body as text.

    Generation 1 is one attention over key rows k1|k2 with queries [q1|0] and [0|q2], which meet their own halves.
    """
    pairs, noises, signals = attributes.num_pairs, attributes.num_noises, attributes.signals_per_noise
    value_width = 2 * width if attributes.generation == 1 else width
    options: dict[str, str | float] = {
        "num_heads": attributes.query_heads,
        "kv_num_heads": attributes.num_kv_pairs,
        "scale": float(attributes.scale),
    }
    cache = "past_key, past_value, seqlens_k, total_sequence_length"
    queries = _masked_queries(attributes, width) if attributes.generation == 1 else "   heads = Identity (query)"
    if attributes.kv_bit_width:
        queries += "\n" + bounded_rows("heads", attributes.kv_bit_width, bool(attributes.do_rotary))
        inputs = f"heads_turned, key_bounded, value_bounded, {cache}, , , , , , k_scale, v_scale"
        # Written only if used: ONNX Runtime before 1.27 does not know them.
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
    """Nodes that make {name}_spread, [B, T, n, r, 1] or [1, 1, n, r, 1] in query's type, of [1] or [B, T, h]."""
    return f"""   {name}_pairs = Constant <value = int64[3] {{1, 1, {pairs}}}> ()
   {name}_groups = Constant <value = int64[5] {{0, 0, {noises}, {signals}, 1}}> ()
   {name}_typed = CastLike ({name}, query)
   {name}_each = Expand ({name}_typed, {name}_pairs)
   {name}_spread = Reshape ({name}_each, {name}_groups)"""


def _masked_queries(attributes: OpAttributes, width: int) -> str:
    """Nodes that make heads: [q|0] of each signal head, [0|q] of each noise head."""
    signals, noises = attributes.signals_per_noise, attributes.num_noises
    mask = ", ".join(["1, 0"] * signals + ["0, 1"])
    return f"""   one_each = Constant <value = int64[6] {{0, 0, {noises}, {signals + 1}, 1, {width}}}> ()
   flat = Constant <value = int64[3] {{0, 0, {attributes.query_heads * 2 * width}}}> ()
   own_half = Constant <value = float[{signals + 1}, 2, 1] {{{mask}}}> ()
   own_half_typed = CastLike (own_half, query)
   rows = Reshape (query, one_each)
   halves = Mul (rows, own_half_typed)
   heads = Reshape (halves, flat)"""


def contrib_problems(attributes: OpAttributes, width: int) -> list[str]:
    """Reasons why GroupQueryAttention cannot compute the op for queries of this width; empty if it can."""
    row = 2 * width if attributes.generation == 1 else width
    problems = contrib_row_problems(row, bool(attributes.do_rotary))
    if attributes.logit_bits:
        problems.append("it keeps logits inside its kernel and cannot quantize them")
    if attributes.kv_bit_width == 6:
        problems.append("it has 8- and 4-bit caches, not 6")
    return problems


def contrib_row_problems(row: int, rotates: bool) -> list[str]:
    """Reasons why GroupQueryAttention cannot take key rows of this width, rotated or not; empty if it can."""
    multiple = 16 if rotates else 8
    return [f"its rows are multiples of {multiple} wide, not {row}"] if row % multiple else []
