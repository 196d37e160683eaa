"""Symmetric integers of 2 to 8 bits, and the 16-bit format, which does not round."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffquant.recipe.numbers.formats import NumberFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# compressed-tensors' name of densely packed integers, as `numbers.packing` writes them.
PACK_QUANTIZED = "pack-quantized"
# Its name of int8 tensors, the only 8-bit weights that vLLM multiplies by rounded activations.
INT_QUANTIZED = "int-quantized"


class Integer(NumberFormat):
    """Integers of b bits. Absmax uses -(2^(b-1) - 1) to 2^(b-1) - 1; error-minimizing roundings also use -2^(b-1).

    Source: arXiv 2410.05258, section 3.7; the layout is compressed-tensors' pack-quantized.
    """

    layout = PACK_QUANTIZED
    integer_refusal = None
    has_integer_levels = True

    def __init__(self, bits: int) -> None:
        self.name, self._bits = str(bits), bits
        self.levels = tuple(range(-(1 << (bits - 1)), 1 << (bits - 1)))

    @property
    def bits(self) -> int:
        return self._bits

    def encode(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        """Return round-half-even(x / scale), clamped to absmax's codes; 16-bit tensors are divided in float32."""
        ratio = (x.float() if x.element_size() == 2 else x) / scale
        return ratio.round_().clamp_(-self.largest, self.largest).char()

    def levels_of(self, codes: "Tensor", dtype: "torch.dtype") -> "Tensor":
        return codes.to(dtype)

    def round_to_absmax_levels_(self, ratio: "Tensor") -> "Tensor":
        """Round to integers in place, without clamping, because absmax scales never exceed the largest code."""
        return ratio.round_()

    def round_to_all_levels_(self, ratio: "Tensor") -> "Tensor":
        return ratio.round_().clamp_(self.lowest, self.largest)

    @property
    def config_fields(self) -> Mapping[str, Any]:
        return {"num_bits": self.bits, "type": "int", "symmetric": True}


class IntegerBytes(Integer):
    """Integers of 8 bits, stored as an int8 tensor with the weight's name, for kernels that multiply rounded inputs.

    Its name in schemes is "8", like that of packed integers. A weight is stored in this format if the recipe rounds the
    inputs of its module. The layout is compressed-tensors' int-quantized.
    """

    layout = INT_QUANTIZED
    is_native = True
    has_stored_shape = False

    def __init__(self) -> None:
        super().__init__(8)

    @property
    def packed_dtype(self) -> "torch.dtype":
        import torch

        return torch.int8

    def packed_width(self, length: int) -> int:
        return length

    def pack(self, codes: "Tensor") -> "Tensor":
        return codes

    def unpack(self, stored: "Tensor", length: int) -> "Tensor":  # noqa: ARG002
        return stored

    def __reduce__(self) -> str:
        # Unpickled as the one object of this format, by its name in this module.
        return "BYTES"


class Unquantized(NumberFormat):
    """The unquantized format: values keep the model's dtype, and there are no codes."""

    name, levels, quantizes = "16", (), False
    bits = 16
    integer_refusal = None


for _bits in range(2, 9):
    register(Integer(_bits))
register(Unquantized())
BYTES = IntegerBytes()
