"""The op's body around one `FlexAttention` of ai.onnx.preview, whose score_mod hides what is to come and rounds logits.

A score_mod sees logits alone, so positions follow from their shape: the last query stands at the last key. Sequences of
a batch are therefore equally long.
"""

from collections.abc import Collection

from diffquant.errors import UsageError
from diffquant.export.graph.inlining import FLEX_ATTENTION, PREVIEW
from diffquant.export.graph.op import OpAttributes
from diffquant.export.graph.pure import constants_text, positions_text, rounded_text, rows_text
from diffquant.export.graph.pure_cache import stored_rows

# Axes of logits [B, heads, T, S] that share a step; a pair's is found of its heads'.
_SHARING = {"row": "3", "head": "2, 3", "pair": "2, 3", "tensor": "1, 2, 3"}


def flex_text(attributes: OpAttributes, width: int, cached: bool, gates: Collection[str]) -> str:
    """Nodes of the body as text.

    Args:
        attributes: attributes of every node that will use it.
        width: d, width of a query.
        cached: whether nodes have a past.
        gates: those of `GATES` that nodes have.

    Raises:
        UsageError: the form cannot say what the attributes ask for.
    """
    if attributes.kv_bit_width == 6:
        raise UsageError("the flex body has 8- and 4-bit caches, not 6")
    if attributes.logit_bits and attributes.logit_granularity == "pair" and attributes.signals_per_noise > 1:
        raise UsageError(
            "FlexAttention rounds a noise map once, and pairs that share it have a step each; use row or head"
        )
    key_width = (2 if attributes.generation == 1 else 1) * width
    kv_pairs = attributes.num_kv_pairs
    parts = [constants_text, positions_text("past_key" if cached else None)]
    parts.append(rows_text("query", attributes.query_heads, width, width, attributes))
    parts.append(rows_text("key", kv_pairs, key_width, width, attributes))
    parts.append(f"""   value_shape = Constant <value = int64[4] {{0, 0, {kv_pairs}, {key_width}}}> ()
   value_turned = Reshape (value, value_shape)""")
    parts += [stored_rows(name, kv_pairs, key_width, attributes, cached) for name in ("key", "value")]
    # A buffer may have room behind the tokens, which no query may take for keys.
    parts += [f"   {name}_tokens = Slice ({name}_read, c0, total, c2)" for name in ("key", "value")]
    parts.append(_heads(attributes, width))
    score_mod = _score_mod(attributes)
    parts.append(f"""   heads = Transpose <perm = [0, 2, 1, 3]> (head_rows)
   both = {PREVIEW}.{FLEX_ATTENTION} <scale = {float(attributes.scale)!r}, score_mod = {score_mod}> (
      heads, key_tokens, value_tokens)""")
    parts.append(_output(attributes, key_width, gates))
    return "\n".join(parts)


def _heads(attributes: OpAttributes, width: int) -> str:
    """Nodes that make head_rows [B, T, h+n, dk] in float32: in generation 1 [q|0] and [0|q], for their own halves."""
    if attributes.generation == 2:
        return "   head_rows = Cast <to = 1> (query_turned)"
    signals, noises = attributes.signals_per_noise, attributes.num_noises
    mask = ", ".join(["1, 0"] * signals + ["0, 1"])
    return f"""   query_wide = Cast <to = 1> (query_turned)
   one_each = Constant <value = int64[6] {{0, 0, {noises}, {signals + 1}, 1, {width}}}> ()
   wide_rows = Constant <value = int64[4] {{0, 0, {attributes.query_heads}, {2 * width}}}> ()
   own_half = Constant <value = float[{signals + 1}, 2, 1] {{{mask}}}> ()
   query_each = Reshape (query_wide, one_each)
   halves = Mul (query_each, own_half)
   head_rows = Reshape (halves, wide_rows)"""


def _score_mod(attributes: OpAttributes) -> str:
    """The graph from logits [B, heads, T, S] to logits that are rounded, and lowest where a query may not look."""
    window = attributes.local_window_size
    seen = (
        f"""   m_window = Constant <value = int64[1] {{{window}}}> ()
   m_oldest = Sub (m_position, m_window)
   m_inside = Greater (m_column, m_oldest)
   m_seen = And (m_causal, m_inside)"""
        if window > 0
        else "   m_seen = Identity (m_causal)"
    )
    scores = _rounded(attributes) if attributes.logit_bits else "   m_scores = Identity (m_logits)"
    return f"""score_mod (float[B, H, L, S] m_logits) => (float[B, H, L, S] m_out) {{
   m_0 = Constant <value = int64 {{0}}> ()
   m_1 = Constant <value = int64 {{1}}> ()
   m_second = Constant <value = int64[1] {{1}}> ()
   m_hidden = Constant <value = float {{-3.0e38}}> ()
   m_zero = Constant <value = float {{0.0}}> ()
   m_one = Constant <value = float {{1.0}}> ()
   m_queries = Shape <start = 2, end = 3> (m_logits)
   m_keys = Shape <start = 3, end = 4> (m_logits)
   m_queries_s = Squeeze (m_queries)
   m_keys_s = Squeeze (m_keys)
   m_before = Sub (m_keys, m_queries)
   m_steps = Range (m_0, m_queries_s, m_1)
   m_places = Add (m_steps, m_before)
   m_position = Unsqueeze (m_places, m_second)
   m_column = Range (m_0, m_keys_s, m_1)
   m_causal = LessOrEqual (m_column, m_position)
{seen}
{scores}
   m_out = Where (m_seen, m_scores, m_hidden)
}}"""


def _rounded(attributes: OpAttributes) -> str:
    """Nodes that make m_scores: logits rounded as `diffquant.attention.logits` rounds them."""
    axes = _SHARING[attributes.logit_granularity]
    unmasked = "   m_unmasked = Identity (m_logits)"
    if attributes.logit_shift:
        unmasked = """   m_seen_logits = Where (m_seen, m_logits, m_hidden)
   m_last = Constant <value = int64[1] {3}> ()
   m_top = ReduceMax (m_seen_logits, m_last)
   m_unmasked = Sub (m_logits, m_top)"""
    shared = "   m_largest = Identity (m_largest_of_axes)"
    if attributes.logit_granularity == "pair":
        shared = f"""   m_by_pair = Constant <value = int64[3] {{0, {attributes.num_pairs}, 2}}> ()
   m_by_head = Constant <value = int64[4] {{0, {attributes.query_heads}, 1, 1}}> ()
   m_third = Constant <value = int64[1] {{2}}> ()
   m_maps = Reshape (m_largest_of_axes, m_by_pair)
   m_of_pair = ReduceMax (m_maps, m_third)
   m_of_both = Concat <axis = 2> (m_of_pair, m_of_pair)
   m_largest = Reshape (m_of_both, m_by_head)"""
    return f"""{unmasked}
   m_prepared = Where (m_seen, m_unmasked, m_zero)
   m_size = Abs (m_prepared)
   m_sharing = Constant <value = int64[{axes.count(",") + 1}] {{{axes}}}> ()
   m_largest_of_axes = ReduceMax (m_size, m_sharing)
{shared}
{rounded_text(attributes, "m_")}"""


def _output(attributes: OpAttributes, value_width: int, gates: Collection[str]) -> str:
    """Nodes that make the output [B, T, h·dv] of both maps' outputs [B, h+n, T, dv]."""
    pairs, noises, signals = attributes.num_pairs, attributes.num_noises, attributes.signals_per_noise
    spread = [_spread("lambda", pairs)]
    gated = "Identity (signal_rows)"
    if "signal_gate" in gates:
        spread.append(_spread("signal_gate", pairs))
        gated = "Mul (signal_gate_spread, signal_rows)"
    last = "Identity (rows_out)"
    wide = ""
    if "output_gate" in gates:
        wide, last = "   output_gate_wide = Cast <to = 1> (output_gate)\n", "Mul (rows_out, output_gate_wide)"
    each = "\n".join(spread)
    return f"""   turned = Transpose <perm = [0, 2, 1, 3]> (both)
   by_noise = Constant <value = int64[5] {{0, 0, {noises}, {signals + 1}, {value_width}}}> ()
   maps = Reshape (turned, by_noise)
   parts = Constant <value = int64[2] {{{signals}, 1}}> ()
   signal_rows, noise_rows = Split <axis = 3> (maps, parts)
   by_group = Constant <value = int64[5] {{0, 0, {noises}, {signals}, 1}}> ()
{each}
   gated = {gated}
   subtracted = Mul (lambda_spread, noise_rows)
   difference = Sub (gated, subtracted)
   row_shape = Constant <value = int64[3] {{0, 0, {pairs * value_width}}}> ()
   rows_out = Reshape (difference, row_shape)
{wide}   gated_rows = {last}
   output = CastLike (gated_rows, query)"""


def _spread(name: str, pairs: int) -> str:
    """Nodes that make {name}_spread [B, T, n, r, 1] of an input [1] or [B, T, h]."""
    return f"""   {name}_pairs = Constant <value = int64[1] {{{pairs}}}> ()
   {name}_shape = Concat <axis = 0> (batch, length, {name}_pairs)
   {name}_each = Expand ({name}, {name}_shape)
   {name}_spread = Reshape ({name}_each, by_group)"""
