"""The op `diffquant::ReadStreams` with its function body: what a part of a layer reads of a token's residual streams.

docs/differential-attention-op.md describes it.
"""

from onnx import FunctionProto, parser

from diffquant.export.graph.op import DOMAIN
from diffquant.model.motif3.streams import EPS, LARGEST_GATE, LARGEST_MIX, SMALLEST_SUM

READ_STREAMS = "ReadStreams"


def read_streams_function(streams: int, rounds: int, opset: int) -> FunctionProto:
    """The op as an ONNX function in standard ops, float32 inside.

    Args:
        streams: number E of residual streams.
        rounds: number of times that the mixing matrix's rows, and then its columns, are divided by their sums.
        opset: the model's version of the standard domain, 18 or later.
    """
    return parser.parse_function(
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"{READ_STREAMS} (x, weight, projection, alpha, bias) => (read, mixed, writes)\n"
        f"{{\n{_text(streams, rounds)}\n}}"
    )


def _text(streams: int, rounds: int) -> str:
    return f"""   flat = Cast <to = 1> (x)
   square = Mul (flat, flat)
   last = Constant <value = int64[1] {{-1}}> ()
   mean = ReduceMean (square, last)
   epsilon = Constant <value_float = {EPS!r}> ()
   raised = Add (mean, epsilon)
   root = Sqrt (raised)
   normed = Div (flat, root)
   weighted = Mul (normed, weight)
   product = MatMul (weighted, projection)
   scaled = Mul (product, alpha)
   gates = Add (scaled, bias)
   sizes = Constant <value = int64[3] {{{streams}, {streams}, {streams**2}}}> ()
   pre, post, res = Split <axis = -1> (gates, sizes)
   largest = Constant <value_float = {LARGEST_GATE!r}> ()
   least = Constant <value_float = {-LARGEST_GATE!r}> ()
   pre_clipped = Clip (pre, least, largest)
   post_clipped = Clip (post, least, largest)
   reads = Sigmoid (pre_clipped)
   writes_row = Sigmoid (post_clipped)
   writes = Unsqueeze (writes_row, last)
   by_stream = Constant <value = int64[4] {{0, 0, {streams}, -1}}> ()
   streams = Reshape (flat, by_stream)
   second = Constant <value = int64[1] {{2}}> ()
   reads_row = Unsqueeze (reads, second)
   read_row = MatMul (reads_row, streams)
   read_wide = Squeeze (read_row, second)
   read = CastLike (read_wide, x)
   by_pair = Constant <value = int64[4] {{0, 0, {streams}, {streams}}}> ()
   res_matrix = Reshape (res, by_pair)
   largest_mix = Constant <value_float = {LARGEST_MIX!r}> ()
   least_mix = Constant <value_float = {-LARGEST_MIX!r}> ()
   res_clipped = Clip (res_matrix, least_mix, largest_mix)
   positive = Exp (res_clipped)
   rounds = Constant <value_int = {rounds}> ()
   always = Constant <value = bool {{1}}> ()
   balanced = Loop <body = balance (int64 round, bool goes, float[b, t, e, f] mix) =>
      (bool goes_on, float[b, t, e, f] next) {{
      goes_on = Identity (goes)
      smallest = Constant <value_float = {SMALLEST_SUM!r}> ()
      row_axis = Constant <value = int64[1] {{-1}}> ()
      column_axis = Constant <value = int64[1] {{-2}}> ()
      row_sums = ReduceSum (mix, row_axis)
      row_divisors = Max (row_sums, smallest)
      by_rows = Div (mix, row_divisors)
      column_sums = ReduceSum (by_rows, column_axis)
      column_divisors = Max (column_sums, smallest)
      next = Div (by_rows, column_divisors)
   }}> (rounds, always, positive)
   mixed = MatMul (balanced, streams)"""
