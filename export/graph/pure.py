"""The attention op's function body in standard ONNX ops, which every ONNX runtime can run; it computes whole maps.

Logits are [B, h_kv, map, g, T, S] with g = h/h_kv, in float32. The functions return nodes as text.
"""

from collections.abc import Collection

from onnx import TensorProto

from diffquant.errors import UsageError
from diffquant.onnx.graph.op import AttentionAttributes
from diffquant.onnx.graph.pure_cache import cache_update_text
from diffquant.recipe.numbers.absmax import max_code
from diffquant.recipe.numbers.simulation import SHIFT_RANGE


def standard_ops_text(attributes: AttentionAttributes, width: int, cached: bool, gates: Collection[str]) -> str:
    """Return the nodes of the "pure" body as text in onnx's syntax.

    Args:
        attributes: attributes of the nodes that will use the body.
        width: width d of a query head.
        cached: whether nodes have past keys and values as inputs.
        gates: gates that nodes have as inputs: "signal_gate", "output_gate", both or none.

    Raises:
        UsageError: the cache has 6 bits, which standard ops cannot read.
    """
    if attributes.kv_bit_width == 6:
        raise UsageError("the pure body supports caches of 8 and 4 bits, not 6")
    key_width = (2 if attributes.generation == 1 else 1) * width
    kv_pairs = attributes.num_kv_pairs
    parts = [_CONSTANTS, _positions("past_key" if cached else None)]
    parts.append(_rotated_rows("query", attributes.query_heads, width, width, attributes))
    parts.append(_rotated_rows("key", kv_pairs, key_width, width, attributes))
    parts.append(f"""   value_shape = Constant <value = int64[4] {{0, 0, {kv_pairs}, {key_width}}}> ()
   value_rows = Reshape (value, value_shape)
   value_turned = Identity (value_rows)""")
    parts += [cache_update_text(name, kv_pairs, key_width, attributes, cached) for name in ("key", "value")]
    parts.append(_logits(attributes, width))
    parts.append(_simulate_rounding(attributes) if attributes.logit_bits else "   scores = Identity (logits)")
    parts.append(_output(attributes, key_width, gates))
    return "\n".join(parts)


_CONSTANTS = f"""   c0 = Constant <value = int64[1] {{0}}> ()
   c1 = Constant <value = int64[1] {{1}}> ()
   c2 = Constant <value = int64[1] {{2}}> ()
   s0 = Constant <value = int64 {{0}}> ()
   s1 = Constant <value = int64 {{1}}> ()
   hidden = Constant <value = float {{-3.0e38}}> ()
   zero = Constant <value = float {{0.0}}> ()
   one = Constant <value = float {{1.0}}> ()
   batch = Shape <start = 0, end = 1> (query)
   length = Shape <start = 1, end = 2> (query)
   length_s = Squeeze (length)
   total_wide = Cast <to = {TensorProto.INT64}> (total_sequence_length)
   total = Reshape (total_wide, c1)"""


def _positions(past: str | None) -> str:
    """Compute `start` [B], the queries' `position` [B, T], the keys' `column` [S], and `real` [B, T], 0 for padding."""
    rows = f"Shape <start = 2, end = 3> ({past})" if past else "Identity (c0)"
    return f"""   past_rows = {rows}
   keys = Max (past_rows, total)
   keys_s = Squeeze (keys)
   last = Cast <to = {TensorProto.INT64}> (seqlens_k)
   tokens = Add (last, c1)
   before = Sub (tokens, length)
   is_first = Equal (length, total)
   start = Where (is_first, c0, before)
   start_column = Unsqueeze (start, c1)
   steps = Range (s0, length_s, s1)
   position = Add (start_column, steps)
   column = Range (s0, keys_s, s1)
   tokens_column = Unsqueeze (tokens, c1)
   real = Less (position, tokens_column)"""


def _rotated_rows(name: str, rows: int, width: int, head_width: int, attributes: AttentionAttributes) -> str:
    """Compute {name}_turned [B, T, rows, width], with RoPE; key rows of several heads use repeated angles."""
    shape = f"""   {name}_shape = Constant <value = int64[4] {{0, 0, {rows}, {width}}}> ()
   {name}_rows = Reshape ({name}, {name}_shape)"""
    if not attributes.do_rotary:
        return f"{shape}\n   {name}_turned = Identity ({name}_rows)"
    half = width // 2
    interleaved = attributes.rotary_interleaved
    # [.., dk/2, 2] puts two channels that rotate together in the last axis; [.., 2, dk/2] in the one before.
    pairing, axis, spread = (f"{half}, 2", 4, "2, 4") if interleaved else (f"2, {half}", 3, "2, 3")
    columns = f"Slice ({name}_%s_all, c0, {name}_half, c2)" if width == head_width else f"Identity ({name}_%s_all)"
    return f"""{shape}
   {name}_pairing = Constant <value = int64[5] {{0, 0, {rows}, {pairing}}}> ()
   {name}_spread = Constant <value = int64[2] {{{spread}}}> ()
   {name}_channels = Reshape ({name}_rows, {name}_pairing)
   {name}_a, {name}_b = Split <axis = {axis}, num_outputs = 2> ({name}_channels)
   {name}_half = Constant <value = int64[1] {{{half}}}> ()
   {name}_cos_all = Gather (cos_cache, position)
   {name}_sin_all = Gather (sin_cache, position)
   {name}_cos_rows = {columns % "cos"}
   {name}_sin_rows = {columns % "sin"}
   {name}_cos = Unsqueeze ({name}_cos_rows, {name}_spread)
   {name}_sin = Unsqueeze ({name}_sin_rows, {name}_spread)
   {name}_ac = Mul ({name}_a, {name}_cos)
   {name}_bs = Mul ({name}_b, {name}_sin)
   {name}_as = Mul ({name}_a, {name}_sin)
   {name}_bc = Mul ({name}_b, {name}_cos)
   {name}_first = Sub ({name}_ac, {name}_bs)
   {name}_second = Add ({name}_as, {name}_bc)
   {name}_pairs = Concat <axis = {axis}> ({name}_first, {name}_second)
   {name}_turned = Reshape ({name}_pairs, {name}_shape)"""


def _logits(attributes: AttentionAttributes, width: int) -> str:
    """Compute `logits` [B, h_kv, 2, g, T, S] and the mask `visible` [B, 1, 1, 1, T, S]."""
    if attributes.generation == 1:
        keys = f"""   by_map = Constant <value = int64[5] {{0, 0, 0, 2, {width}}}> ()
   key_maps = Reshape (key_read, by_map)
   key_columns = Transpose <perm = [0, 1, 3, 4, 2]> (key_maps)
   group_axis = Constant <value = int64[1] {{3}}> ()"""
    else:
        keys = """   key_columns = Transpose <perm = [0, 1, 3, 2]> (key_read)
   group_axis = Constant <value = int64[2] {2, 3}> ()"""
    seen = _WINDOW_TEXT if attributes.local_window_size > 0 else "   seen = Identity (causal)"
    return f"""{keys}
   keys_spread = Unsqueeze (key_columns, group_axis)
   query_wide = Cast <to = {TensorProto.FLOAT}> (query_turned)
{_by_map(attributes, width)}
   queries = Transpose <perm = [0, 2, 4, 3, 1, 5]> (query_groups)
   products = MatMul (queries, keys_spread)
   scale_of_logits = Constant <value_float = {float(attributes.scale)!r}> ()
   logits = Mul (products, scale_of_logits)
   position_column = Unsqueeze (position, c2)
   causal = LessOrEqual (column, position_column)
{seen}
   map_axes = Constant <value = int64[3] {{1, 2, 3}}> ()
   visible = Unsqueeze (seen, map_axes)"""


# The window is -1 in nodes without one.
_WINDOW_TEXT = """   window = Constant <value_int: int = @local_window_size> ()
   no_window = Less (window, s1)
   oldest = Sub (position_column, window)
   near = Greater (column, oldest)
   inside = Or (near, no_window)
   seen = And (causal, inside)"""


def _by_map(attributes: AttentionAttributes, width: int) -> str:
    """Compute `query_groups` [B, T, h_kv, g, 2, d]; a noise head that several pairs share is repeated for each."""
    kv_pairs, group = attributes.num_kv_pairs, attributes.num_pairs // attributes.num_kv_pairs
    signals = attributes.signals_per_noise
    if signals == 1:
        return f"""   by_group = Constant <value = int64[6] {{0, 0, {kv_pairs}, {group}, 2, {width}}}> ()
   query_groups = Reshape (query_wide, by_group)"""
    noises = attributes.num_noise_heads
    return f"""   by_noise = Constant <value = int64[5] {{0, 0, {noises}, {signals + 1}, {width}}}> ()
   by_group = Constant <value = int64[6] {{0, 0, {kv_pairs}, {group}, 1, {width}}}> ()
   query_parts = Constant <value = int64[2] {{{signals}, 1}}> ()
   noise_times = Constant <value = int64[5] {{1, 1, 1, {signals}, 1}}> ()
   query_noises = Reshape (query_wide, by_noise)
   query_signal, query_noise = Split <axis = 3> (query_noises, query_parts)
   query_noise_each = Expand (query_noise, noise_times)
   query_signal_groups = Reshape (query_signal, by_group)
   query_noise_groups = Reshape (query_noise_each, by_group)
   query_groups = Concat <axis = 4> (query_signal_groups, query_noise_groups)"""


_SHARING = {"row": "5", "head": "4, 5", "pair": "2, 4, 5", "tensor": "1, 2, 3, 4, 5"}


def _simulate_rounding(attributes: AttentionAttributes) -> str:
    """Compute `scores`: logits quantized and dequantized as in `diffquant.attention.logits`."""
    axes = _SHARING[attributes.logit_granularity]
    shifted = (
        """   seen_logits = Where (visible, logits, hidden)
   key_axis = Constant <value = int64[1] {5}> ()
   largest_of_row = ReduceMax (seen_logits, key_axis)
   unmasked = Sub (logits, largest_of_row)"""
        if attributes.logit_shift
        else "   unmasked = Identity (logits)"
    )
    return f"""{shifted}
   prepared = Where (visible, unmasked, zero)
   size = Abs (prepared)
   real_axes = Constant <value = int64[4] {{1, 2, 3, 5}}> ()
   real_rows = Unsqueeze (real, real_axes)
   counted = Where (real_rows, size, zero)
   sharing = Constant <value = int64[{axes.count(",") + 1}] {{{axes}}}> ()
   largest = ReduceMax (counted, sharing)
{_round_logits(attributes)}"""


def _round_logits(attributes: AttentionAttributes) -> str:
    """Compute `scores`: `prepared` logits rounded to multiples of `step`, the range divided by the number of levels."""
    bits = attributes.logit_bits
    levels = 2**bits - 1 if attributes.logit_shift else max_code(bits)
    ranged, clamped = "   range = Identity (largest)", "   logit_codes = Identity (nearest)"
    if attributes.logit_shift:
        ranged = f"""   shift_range = Constant <value_float = {SHIFT_RANGE!r}> ()
   range = Min (largest, shift_range)"""
        clamped = f"""   lowest = Constant <value_float = {float(-levels)!r}> ()
   logit_codes = Max (nearest, lowest)"""
    return f"""{ranged}
   levels = Constant <value_float = {float(levels)!r}> ()
   step_or_zero = Div (range, levels)
   no_step = Equal (step_or_zero, zero)
   step = Where (no_step, one, step_or_zero)
   steps_away = Div (prepared, step)
   nearest = Round (steps_away)
{clamped}
   scores = Mul (logit_codes, step)"""


def _output(attributes: AttentionAttributes, value_width: int, gates: Collection[str]) -> str:
    """Compute the output [B, T, h·dv] from scores and values."""
    pairs = attributes.num_pairs
    per_pair = [_per_pair("lambda", attributes)]
    gated = "Identity (signal)"
    if "signal_gate" in gates:
        per_pair.append(_per_pair("signal_gate", attributes))
        gated = "Mul (signal_gate_spread, signal)"
    last = (
        """   output_gate_wide = Cast <to = 1> (output_gate)
   gated_rows = Mul (rows_out, output_gate_wide)"""
        if "output_gate" in gates
        else "   gated_rows = Identity (rows_out)"
    )
    spread = "\n".join(per_pair)
    return f"""   masked = Where (visible, scores, hidden)
   weights = Softmax <axis = -1> (masked)
   shared_axes = Constant <value = int64[2] {{2, 3}}> ()
   values = Unsqueeze (value_read, shared_axes)
   both = MatMul (weights, values)
   signal, noise = Split <axis = 2, num_outputs = 2> (both)
{spread}
   gated = {gated}
   subtracted = Mul (lambda_spread, noise)
   difference = Sub (gated, subtracted)
   without_map = Squeeze (difference, c2)
   by_token = Transpose <perm = [0, 3, 1, 2, 4]> (without_map)
   row_shape = Constant <value = int64[3] {{0, 0, {pairs * value_width}}}> ()
   rows_out = Reshape (by_token, row_shape)
{last}
   output = CastLike (gated_rows, query)"""


def _per_pair(name: str, attributes: AttentionAttributes) -> str:
    """Expand an input [1] or [B, T, h] to {name}_spread [B, h_kv, 1, g, T, 1]."""
    pairs, kv_pairs = attributes.num_pairs, attributes.num_kv_pairs
    return f"""   {name}_pairs = Constant <value = int64[1] {{{pairs}}}> ()
   {name}_shape = Concat <axis = 0> (batch, length, {name}_pairs)
   {name}_each = Expand ({name}, {name}_shape)
   {name}_by_group = Constant <value = int64[4] {{0, 0, {kv_pairs}, {pairs // kv_pairs}}}> ()
   {name}_groups = Reshape ({name}_each, {name}_by_group)
   {name}_turned = Transpose <perm = [0, 2, 3, 1]> ({name}_groups)
   {name}_axes = Constant <value = int64[2] {{2, 5}}> ()
   {name}_spread = Unsqueeze ({name}_turned, {name}_axes)"""
