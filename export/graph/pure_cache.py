"""The KV cache in the pure body: quantizing new rows, appending them to the past, and dequantizing both.

The functions return nodes as text.
"""

from onnx import TensorProto

from diffquant.onnx.graph.op import AttentionAttributes
from diffquant.recipe.numbers.absmax import max_code


def cache_update_text(name: str, kv_pairs: int, width: int, attributes: AttentionAttributes, cached: bool) -> str:
    """Return nodes, as text, that append new keys or values to the cache, and dequantize all of it.

    The outputs are present_{name}, the cache, and {name}_read, its float32 values [B, h_kv, S, width] for S tokens.

    Args:
        name: "key" or "value".
        kv_pairs: number h_kv of KV pairs.
        width: number of channels of a KV pair.
        attributes: attributes of the nodes that will use the body.
        cached: whether nodes have past keys and values as inputs.
    """
    bits = attributes.kv_bit_width
    scale = f"{name[0]}_scale"
    stored_width = width // 2 if bits == 4 else width
    new = f"   {name}_new = Transpose <perm = [0, 2, 1, 3]> ({name}_turned)"
    encode = _encode(name, scale, width, bits) if bits else f"   {name}_codes = Identity ({name}_new)"
    cast = f"   {name}_read = Cast <to = {TensorProto.FLOAT}> (present_{name})"
    decode = _decode(name, scale, width, bits) if bits else cast
    keep = _merge(name, kv_pairs, stored_width) if cached else f"   present_{name} = Identity ({name}_codes)"
    return "\n".join([new, encode, keep, decode])


def _merge(name: str, kv_pairs: int, width: int) -> str:
    """Write the new rows into the past from row `start` on, by gathering each present row from past ++ new."""
    return f"""   {name}_all = Concat <axis = 2> (past_{name}, {name}_codes)
   {name}_since = Sub (column, start_column)
   {name}_not_before = GreaterOrEqual ({name}_since, c0)
   {name}_not_after = Less ({name}_since, length)
   {name}_is_new = And ({name}_not_before, {name}_not_after)
   {name}_from_new = Add ({name}_since, past_rows)
   {name}_rows_all = Shape <start = 2, end = 3> ({name}_all)
   {name}_last_row = Sub ({name}_rows_all, c1)
   {name}_from_past = Min (column, {name}_last_row)
   {name}_pick = Where ({name}_is_new, {name}_from_new, {name}_from_past)
   {name}_axes = Constant <value = int64[2] {{1, 3}}> ()
   {name}_pick_spread = Unsqueeze ({name}_pick, {name}_axes)
   {name}_repeats = Constant <value = int64[4] {{1, {kv_pairs}, 1, {width}}}> ()
   {name}_index = Expand ({name}_pick_spread, {name}_repeats)
   present_{name} = GatherElements <axis = 2> ({name}_all, {name}_index)"""


def _encode(name: str, scale: str, width: int, bits: int) -> str:
    """Quantize the new rows to the cache's codes."""
    high = max_code(bits)
    rounded = f"""   {name}_wide = Cast <to = {TensorProto.FLOAT}> ({name}_new)
   {name}_ratio = Div ({name}_wide, {scale})
   {name}_nearest = Round ({name}_ratio)
   {name}_low = Constant <value = float {{{-high}.0}}> ()
   {name}_high = Constant <value = float {{{high}.0}}> ()
   {name}_clamped = Clip ({name}_nearest, {name}_low, {name}_high)"""
    if bits == 8:
        return f"{rounded}\n   {name}_codes = Cast <to = {TensorProto.INT8}> ({name}_clamped)"
    return f"""{rounded}
   {name}_zero = Constant <value = float {{{high + 1}.0}}> ()
   {name}_unsigned = Add ({name}_clamped, {name}_zero)
   {name}_by_byte = Constant <value = int64[5] {{0, 0, 0, {width // 2}, 2}}> ()
   {name}_nibbles = Reshape ({name}_unsigned, {name}_by_byte)
   {name}_places = Constant <value = float[2] {{1.0, 16.0}}> ()
   {name}_placed = Mul ({name}_nibbles, {name}_places)
   {name}_last_axis = Constant <value = int64[1] {{-1}}> ()
   {name}_byte = ReduceSum <keepdims = 0> ({name}_placed, {name}_last_axis)
   {name}_codes = Cast <to = {TensorProto.UINT8}> ({name}_byte)"""


def _decode(name: str, scale: str, width: int, bits: int) -> str:
    """Dequantize present_{name} to {name}_read."""
    stored = f"   {name}_stored = Cast <to = {TensorProto.FLOAT}> (present_{name})"
    if bits == 8:
        return f"{stored}\n   {name}_read = Mul ({name}_stored, {scale})"
    return f"""{stored}
   {name}_sixteen = Constant <value = float {{16.0}}> ()
   {name}_shifted = Div ({name}_stored, {name}_sixteen)
   {name}_upper = Floor ({name}_shifted)
   {name}_upper_placed = Mul ({name}_upper, {name}_sixteen)
   {name}_lower = Sub ({name}_stored, {name}_upper_placed)
   {name}_byte_axis = Constant <value = int64[1] {{4}}> ()
   {name}_lower_column = Unsqueeze ({name}_lower, {name}_byte_axis)
   {name}_upper_column = Unsqueeze ({name}_upper, {name}_byte_axis)
   {name}_both = Concat <axis = 4> ({name}_lower_column, {name}_upper_column)
   {name}_row_shape = Constant <value = int64[4] {{0, 0, 0, {width}}}> ()
   {name}_row = Reshape ({name}_both, {name}_row_shape)
   {name}_signed = Sub ({name}_row, {name}_zero)
   {name}_read = Mul ({name}_signed, {scale})"""
