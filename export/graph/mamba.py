"""The ops `diffquant::CausalConvolution` and `diffquant::SelectiveScan`, Mamba-1's own, with bodies in standard ops.

docs/differential-attention-op.md is the specification; a test keeps its tables and these schemas alike.
"""

from onnx import FunctionProto, parser
from onnx.defs import OpSchema

from diffquant.export.graph.op import DOMAIN, VERSION, parameter

CAUSAL_CONVOLUTION, SELECTIVE_SCAN = "CausalConvolution", "SelectiveScan"


def causal_convolution_schema() -> OpSchema:
    """The op's schema as onnx describes ops."""
    return OpSchema(
        CAUSAL_CONVOLUTION,
        DOMAIN,
        VERSION,
        doc="Each channel's convolution over a token and the W - 1 before it, which past_state holds of earlier calls.",
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
    """The op's schema as onnx describes ops."""
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


def causal_convolution_function(seen: int, opset: int) -> FunctionProto:
    """The op as an ONNX function, a product for each token that a channel sees.

    Args:
        seen: W, number of those tokens.
        opset: version of the standard domain, that of the model.
    """
    return _function(causal_convolution_schema(), opset, _convolution_text(seen))


def selective_scan_function(opset: int) -> FunctionProto:
    """The op as an ONNX function around one Scan.

    Args:
        opset: version of the standard domain, that of the model.
    """
    return _function(selective_scan_schema(), opset, _SCAN_TEXT)


def _function(op: OpSchema, opset: int, text: str) -> FunctionProto:
    inputs, outputs = (", ".join(each.name for each in parameters) for parameters in (op.inputs, op.outputs))
    return parser.parse_function(
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n{op.name} ({inputs}) => ({outputs})\n{{\n{text}\n}}'
    )


def _convolution_text(seen: int) -> str:
    taps = "\n".join(
        f"""   first_{tap} = Constant <value = int64[1] {{{tap}}}> ()
   last_{tap} = Add (length, first_{tap})
   inputs_{tap} = Slice (inputs, first_{tap}, last_{tap}, axis)
   weight_{tap} = Gather (weight, first_{tap})
   tap_{tap} = Mul (inputs_{tap}, weight_{tap})"""
        for tap in range(seen)
    )
    sums = "\n".join(f"   sum_{tap} = Add ({f'sum_{tap - 1}' if tap else 'bias'}, tap_{tap})" for tap in range(seen))
    return f"""   axis = Constant <value = int64[1] {{1}}> ()
   length = Shape <start = 1, end = 2> (u)
   inputs = Concat <axis = 1> (past_state, u)
{taps}
{sums}
   y = Identity (sum_{seen - 1})
   zero = Constant <value = int64 {{0}}> ()
   kept = Constant <value = int64 {{{seen - 1}}}> ()
   one = Constant <value = int64 {{1}}> ()
   behind = Constant <value = int64[1] {{2}}> ()
   places = Range (zero, kept, one)
   starts = Unsqueeze (counts, axis)
   rows = Add (starts, places)
   index = Unsqueeze (rows, behind)
   present_state = GatherND <batch_dims = 1> (inputs, index)"""


# Scan's sequence is the first axis, the only one that onnx's reference evaluator knows.
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
