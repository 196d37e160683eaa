"""NVFP4: E2M1 floats, 16 of which share an e4m3 scale. Each weight also has one float32 tensor scale.

A weight's `tensor_scale` g is a divisor, as in compressed-tensors: value = level · (block scale / g), in float32.
ModelOpt stores 1/g as `weight_scale_2`. KV cache, logits and operands have no tensor scale (g is 1), because tokens are
rounded as they arrive. Their block scales are plain e4m3 numbers, from 2^-9 to 448.

Source: compressed-tensors 0.20, nvfp4-pack-quantized; `nvfp4_4over6` is Cook et al., Four Over Six, arXiv 2512.02010.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from diffquant.recipe.numbers.formats import register
from diffquant.recipe.numbers.formats.minifloat import Minifloat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from diffquant.recipe.numbers.absmax import Axes

_LARGEST_SCALE = 448.0
# Block scale of a block of zeros, as in compressed-tensors.
_OF_ZEROS = 0.125


class Nvfp4(Minifloat):
    """E2M1 codes with one e4m3 scale per block of 16 values, which maps the block's largest magnitude to 6."""

    block = 16
    stored_scales = "float8_e4m3fn"
    spans_tensor = True
    group_strategy = "tensor_group"
    has_stored_shape = False
    # With 1.5 times the absmax scale, the largest magnitude is at level 4, around which levels are closer.
    trials = (1.5, *(1 - n / 40 for n in range(20)))
    # Largest block scale of a weight, before division by the tensor scale.
    _top_scale: ClassVar[float] = _LARGEST_SCALE

    def __init__(self, name: str, tensor_scale: "Tensor | None" = None) -> None:
        super().__init__(name, 2, 1, 6)
        self.tensor_scale = tensor_scale

    def with_tensor_scale(self, largest: "Tensor") -> "Nvfp4":
        """Return the format for one weight, with tensor scale 448 · 6 / its largest magnitude."""
        import torch

        largest = largest.reshape(1).float().clamp(min=torch.finfo(torch.float32).tiny)
        divisor = torch.nan_to_num(self._top_scale * self.largest / largest, nan=1.0, posinf=1.0)
        return type(self)(self.name, divisor)

    def scale_for_largest(self, largest: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":  # noqa: ARG002
        return self._divide(self._block_scale(largest / self.largest))

    def round_scale(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        return self._divide(self._block_scale(scale.abs())).to(dtype)

    def _block_scale(self, scale: "Tensor") -> "Tensor":
        """Round a positive scale to e4m3, and return it in its own dtype."""
        import torch

        wide = scale if self.tensor_scale is None else self.tensor_scale.to(scale.device) * scale
        rounded = wide.clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn).to(scale.dtype)
        return torch.where(rounded == 0, _OF_ZEROS, rounded)

    def _divide(self, block_scale: "Tensor") -> "Tensor":
        return block_scale if self.tensor_scale is None else block_scale / self.tensor_scale.to(block_scale.device)

    def pack_scale(self, scale: "Tensor") -> "Tensor":
        """Return the block scales, multiplied by the tensor scale, as e4m3 bytes."""
        import torch

        wide = scale.float() if self.tensor_scale is None else scale.float() * self.tensor_scale.to(scale.device)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8)

    def unpack_scale(self, stored: "Tensor", tensor_scale: "Tensor | None" = None) -> "Tensor":
        import torch

        block_scale = stored.view(torch.float8_e4m3fn).float()
        return block_scale if tensor_scale is None else block_scale / tensor_scale.float()

    @property
    def layout(self) -> str:
        return "nvfp4-pack-quantized"

    @property
    def config_fields(self) -> Mapping[str, Any]:
        return {"num_bits": 4, "type": "float", "symmetric": True, "scale_dtype": "torch.float8_e4m3fn"}


class FourOverSix(Nvfp4):
    """NVFP4 that maps a block's largest magnitude to 4 or 6, whichever gives the smaller squared error.

    Levels near 4 are closer together than those near 6. The largest block scale of a weight is 256 instead of 448, so
    that 1.5 times this scale is still an e4m3 number.
    """

    fits_errors = True
    _top_scale = 256.0

    def compute_scale(self, x: "Tensor", dim: "Axes", dtype: "torch.dtype | None" = None) -> "Tensor":
        import torch

        six = super().compute_scale(x, dim, dtype)
        four = self.scale_for_largest(x.abs().amax(dim, keepdim=True).to(six.dtype) * (self.largest / 4))
        errors = [(self.simulate(x, s) - x).square().sum(dim, keepdim=True) for s in (six, four)]
        return torch.where(errors[1] < errors[0], four, six)


register(Nvfp4("nvfp4"))
register(FourOverSix("nvfp4_4over6"))
