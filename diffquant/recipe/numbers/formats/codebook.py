"""IQ4_NL and IQ4_XS: 16 uneven levels, with a scale per 32 values, as llama.cpp's GGUF files have them.

No level is 0: a weight of 0 becomes 1 · scale, except in a group of zeros, whose scale is 0. Scales may be negative.

Source: ggml, src/ggml-common.h (`kvalues_iq4nl`, `block_iq4_nl`, `block_iq4_xs`) and src/ggml-quants.c.
"""

from functools import cache
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.recipe.numbers.formats import NumberFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from diffquant.recipe.numbers.absmax import Axes

# The most negative multiple of a step that 6 bits can hold, and the largest float16.
_LOWEST_MULTIPLE, _LARGEST_HALF = -32, 65504.0


class Iq4Nl(NumberFormat):
    """4-bit codes with one float16 scale per group, which maps the value with the largest magnitude to level -127."""

    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    zero_index = 8
    for_weights_only = True
    has_stored_shape = False
    # Negative scales map the largest magnitude to a positive level.
    trials = tuple(sign * (1.3 - n / 20) for sign in (1, -1) for n in range(11))
    refits_scale = True

    def __init__(self, name: str, block: int = 32) -> None:
        self.name, self.block = name, block  # type: ignore[misc]

    def scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":  # noqa: ARG002
        import torch

        return torch.float16 if self.stored_scales is None else torch.float32

    def compute_scale(self, x: "Tensor", dim: "Axes", dtype: "torch.dtype | None" = None) -> "Tensor":
        import torch

        from diffquant.recipe.numbers.absmax import computing_dtype

        high, low = x.amax(dim, keepdim=True), x.amin(dim, keepdim=True)
        scale = torch.where(high > -low, high, low).to(computing_dtype(x)) / self.lowest
        return scale if dtype is None else self.round_scale(scale, dtype)

    def round_scale(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        return scale.clamp(-_LARGEST_HALF, _LARGEST_HALF).to(dtype)

    def encode(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        """Return the codes of the levels nearest to x / scale, which may be negative. Ties go to the higher code."""
        import torch

        from diffquant.recipe.numbers.absmax import computing_dtype

        return _look_up(_nearest_levels()[1].to(torch.int8), x.to(computing_dtype(x)) / scale)

    def round_to_all_levels_(self, ratio: "Tensor") -> "Tensor":
        return ratio.copy_(_look_up(_nearest_levels()[0], ratio))


class Iq4Xs(Iq4Nl):
    """IQ4_NL whose scales are multiples, from -32 to 31, of a float16 step that neighbouring groups of a row share.

    `with_fitted_step` returns a copy with the steps of some rows. Without steps, scales are not rounded to multiples.
    Stored scales are the first 8 bytes of ggml's blocks of 256 values: the step, then the upper 2 and the lower 4 bits
    of 8 multiples, each plus 32.
    """

    stored_scales = "uint8"

    def __init__(self, name: str, block: int = 32, scales_per_step: int = 8, step: "Tensor | None" = None) -> None:
        super().__init__(name, block)
        self.scales_per_step, self._step = scales_per_step, step  # type: ignore[misc]

    def compute_scale(self, x: "Tensor", dim: "Axes", dtype: "torch.dtype | None" = None) -> "Tensor":
        scale = super().compute_scale(x, dim)
        if dtype is None:
            return scale
        parts = self._by_step(scale, -2)
        return self.with_fitted_step(parts, -2).round_scale(parts, dtype).flatten(-3, -2)

    def round_scale(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        return (scale if self._step is None else _multiples(scale, self._step) * self._step).to(dtype)

    def with_fitted_step(self, scale: "Tensor", dim: int) -> "Iq4Xs":
        return Iq4Xs(self.name, self.block or 0, self.scales_per_step, self._find_step(scale, dim))

    def _find_step(self, scale: "Tensor", dim: int) -> "Tensor":
        """Return the steps of least squared error for scales; the error is 0 if they are multiples of one already."""
        import torch

        extreme = scale.gather(dim, scale.abs().argmax(dim, keepdim=True))
        best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
        for multiple in range(_LOWEST_MULTIPLE, 0):
            step = (extreme / multiple).clamp(-_LARGEST_HALF, _LARGEST_HALF).half().to(scale.dtype)
            error = (_multiples(scale, step) * step - scale).square().sum(dim, keepdim=True)
            best, least = torch.where(error < least, step, best), error.minimum(least)
        return best

    def pack_scale(self, scale: "Tensor") -> "Tensor":
        import torch

        parts = self._by_step(scale.float(), -1)
        step = self._find_step(parts, -1)
        multiples = (_multiples(parts, step) - _LOWEST_MULTIPLE).to(torch.uint8)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        upper = ((multiples >> 4).unflatten(-1, (2, 4)) << shifts).sum(-1, dtype=torch.uint8)
        lower = (multiples & 15).unflatten(-1, (4, 2))
        halves = [step.half().contiguous().view(torch.uint8), upper, lower[..., 0] | lower[..., 1] << 4]
        return torch.cat(halves, -1).flatten(-2)

    def unpack_scale(self, stored: "Tensor", tensor_scale: "Tensor | None" = None) -> "Tensor":  # noqa: ARG002
        import torch

        step, upper, lower = self._by_step(stored, -1).split([2, 2, 4], -1)
        upper = upper[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=stored.device) & 3
        lower = lower[..., None] >> torch.tensor([0, 4], dtype=torch.uint8, device=stored.device) & 15
        multiples = (upper << 4).flatten(-2) | lower.flatten(-2)
        scale: Tensor = step.contiguous().view(torch.float16).float() * (multiples.float() + _LOWEST_MULTIPLE)
        return scale.flatten(-2)

    def _by_step(self, scale: "Tensor", dim: int) -> "Tensor":
        """Return scales with those of a step along a separate axis.

        Raises:
            UsageError: a row is not a whole number of steps.
        """
        if scale.shape[dim] % self.scales_per_step:
            size = (self.block or 0) * self.scales_per_step
            raise UsageError(f"{self.name} needs rows of a multiple of {size} values; use iq4_nl for the others")
        parts: Tensor = scale.unflatten(dim, (-1, self.scales_per_step))
        return parts


@cache
def _nearest_levels() -> "tuple[Tensor, Tensor]":
    """Return the level, and its code, nearest to each interval of length 1/2 from -128 on; ties are at their ends."""
    import torch

    levels = torch.tensor(Iq4Nl.levels, dtype=torch.float32)
    places = torch.bucketize((torch.arange(512) - 255.5) / 2, (levels[1:] + levels[:-1]) / 2)
    return levels[places], places - Iq4Nl.zero_index


def _look_up(table: "Tensor", ratio: "Tensor") -> "Tensor":
    """Return the table's entry for each ratio; NaN, the ratio of 0 to a scale of 0, counts as 0."""
    import torch

    places = (ratio * 2).nan_to_num_().floor_().clamp_(-256, 255).add_(256).to(torch.int32)
    return torch.index_select(table.to(ratio.device), 0, places.flatten()).view(ratio.shape)


def _multiples(scale: "Tensor", step: "Tensor") -> "Tensor":
    """Return the multiple of the step nearest to each scale that 6 bits hold; 0 only for a scale of 0."""
    import torch

    ratio = scale / step
    rounded = torch.where(ratio.abs() < 1, ratio.sign(), ratio.round()).clamp(_LOWEST_MULTIPLE, -1 - _LOWEST_MULTIPLE)
    return torch.where(scale == 0, 0.0, rounded)


register(Iq4Nl("iq4_nl"))
register(Iq4Xs("iq4_xs"))
