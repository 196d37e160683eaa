"""The op `diffquant::MatMulNBits`: ONNX Runtime's op of that name with rounded activations, with a kernel of ours.

docs/differential-attention-op.md is the specification; a test keeps its tables and this schema alike.
"""

from onnx import FunctionProto, parser
from onnx.defs import OpSchema

from diffquant.export.graph.op import CONTRIB, DOMAIN, VERSION, parameter

MATMUL = "MatMulNBits"
# Whole numbers that ONNX Runtime's op has by the same names.
ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")


def matmul_schema() -> OpSchema:
    """The op's schema as onnx describes ops."""
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


def matmul_function(opset: int) -> FunctionProto:
    """The op as an ONNX function, which is one MatMulNBits of ONNX Runtime.

    Args:
        opset: version of the standard domain, that of the model.
    """
    copied = ", ".join(f"{name}: int = @{name}" for name in ATTRIBUTES)
    return parser.parse_function(
        f'<opset_import: ["" : {opset}, "{CONTRIB}" : 1], domain: "{DOMAIN}">\n'
        f"{MATMUL} <{', '.join(ATTRIBUTES)}> (A, B, scales) => (Y)\n"
        f"{{\n   Y = {CONTRIB}.{MATMUL} <{copied}> (A, B, scales)\n}}"
    )
