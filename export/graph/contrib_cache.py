"""What comes before ONNX Runtime's GroupQueryAttention where its cache holds codes.

It stores a code lower than the format has, -2^(b-1), for what lies below a channel's range. Rows are therefore bounded
before they come to it, and rotated before that.
"""

from onnx import TensorProto

from diffquant.export.graph.op import CONTRIB

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


def bounded_rows(heads: str, bits: int, rotates: bool) -> str:
    """Nodes that make {heads}_turned, key_bounded and value_bounded of heads, key and value [B, T, rows].

    Args:
        heads: query heads, as wide as key rows.
        bits: width of the cache's codes.
        rotates: whether positions turn query heads and keys.
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
