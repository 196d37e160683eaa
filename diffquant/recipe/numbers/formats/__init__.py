"""`NumberFormat`: the numbers that codes stand for, and how codes become bytes. Each file defines one family.

These files import torch inside methods, because the command line parses schemes without it.
"""

import sys
from abc import ABC
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from diffquant.errors import UsageError
from diffquant.support.names import import_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from diffquant.recipe.numbers.absmax import Axes


class NumberFormat(ABC):
    """A number format: a quantized value is a level times a scale.

    A level's code is its index in `levels` minus `zero_index`, the index of 0. If levels are consecutive whole numbers,
    codes equal levels. A format must define its name and levels; all else has defaults that follow from them.

    Attributes:
        name: the format's name in schemes: "4" in "4:g32".
        levels: the numbers that codes stand for, ascending, at most 256; one is 0, except in formats for weights only.
        quantizes: whether values are rounded; False only for 16 bits.
        block: number of neighbouring values that share a scale, or None if the scheme sets it.
        spans_tensor: whether each scale of a weight depends on the largest magnitude of the whole weight.
        fits_errors: whether scales minimize the rounding error, so that they depend on more than the largest magnitude.
        trials: multiples of the absmax scale that error-minimizing roundings try. If empty, they are derived from the
            number of bits of a code.
        refits_scale: whether these roundings also try the scale of least squared error for the best trial's levels.
        has_tiles: whether a weight may have one scale per square block.
        for_weights_only: whether only weights may have this format.
        is_native: whether a weight's codes are stored as the weight itself, in a dtype that has them.
        has_stored_shape: whether a weight's shape is a separate tensor, because the packed shape does not determine it.
        tensor_scale: scale [1] of the whole tensor, stored in addition to a weight's scales, or None.
        group_strategy: compressed-tensors' name for one scale per group.
        stored_scales: dtype of scales in a file if they have fewer than 16 bits there (computations take them in
            float32); else None.
        scales_per_step: number of neighbouring scales of a row that are multiples of one step; 1 if scales are free.
    """

    name: str
    levels: tuple[float, ...]
    quantizes: ClassVar[bool] = True
    block: ClassVar[int | None] = None
    spans_tensor: ClassVar[bool] = False
    fits_errors: ClassVar[bool] = False
    trials: ClassVar[tuple[float, ...]] = ()
    refits_scale: ClassVar[bool] = False
    has_tiles: ClassVar[bool] = False
    for_weights_only: ClassVar[bool] = False
    is_native: ClassVar[bool] = False
    has_stored_shape: ClassVar[bool] = True
    tensor_scale: "Tensor | None" = None
    group_strategy: ClassVar[str] = "group"
    stored_scales: ClassVar[str | None] = None
    scales_per_step: ClassVar[int] = 1

    # Plain properties: a cached one takes a lock, which torch.compile cannot trace.
    @property
    def zero_index(self) -> int:
        """Index of the level with code 0."""
        return self.levels.index(0)

    @property
    def largest(self) -> float:
        """Level to which absmax maps the largest magnitude."""
        return self.levels[-1]

    @property
    def lowest(self) -> float:
        """Lowest level. Absmax may leave it unused; error-minimizing roundings use it."""
        return self.levels[0]

    @property
    def clip_limit(self) -> float:
        """Largest magnitude, in units of the scale, that is not clipped: half a step beyond the last level."""
        return self.largest + (self.largest - self.levels[-2]) / 2

    @property
    def interval_count(self) -> int:
        """Number of steps from the lowest to the largest level, one less than the number of levels."""
        return len(self.levels) - 1

    @cached_property
    def has_integer_levels(self) -> bool:
        """Whether codes equal levels, so that arithmetic on codes is valid."""
        return self.levels == tuple(range(int(self.lowest), int(self.largest) + 1))

    @property
    def code_width(self) -> int:
        """Number of bits needed for a code."""
        return self.interval_count.bit_length()

    @property
    def integer_refusal(self) -> str | None:
        """Reason why code that supports only integer formats, such as a kernel, cannot read this one, or None."""
        return f"{self.name} is not an integer format of 2 to 8 bits, the only kind supported here; use one, such as 4"

    @property
    def bits(self) -> int:
        """Number of bits of an integer format's codes; 16 for the unquantized format.

        Raises:
            UsageError: this is not an integer format.
        """
        raise UsageError(self.integer_refusal or "")

    def scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":
        """Return the dtype of the scales of a weight whose unquantized dtype is `dtype`: by default one of 16 bits.

        A 16-bit dtype is kept. Wider dtypes become bfloat16, which has float32's range, so that no scale overflows.
        """
        import torch

        if self.stored_scales is not None:
            return torch.float32
        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16

    def stored_scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":
        """Return the dtype of the stored scale tensor of a weight whose unquantized dtype is `dtype`."""
        import torch

        return self.scale_dtype(dtype) if self.stored_scales is None else getattr(torch, self.stored_scales)

    def accepts_scale_dtype(self, dtype: "torch.dtype") -> bool:
        """Return whether scales in a checkpoint may have this dtype."""
        is_16_bit = dtype.is_floating_point and dtype.itemsize > 1
        return is_16_bit if self.stored_scales is None else dtype == self.stored_scale_dtype(dtype)

    def compute_scale(self, x: "Tensor", dim: "Axes", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Return the scale that maps the largest magnitude along `dim` to the largest level.

        Args:
            x: [...] finite floats.
            dim: axes that share one scale.
            dtype: dtype of the scale, for formats that allow any.

        Returns:
            `x`'s shape with `dim` reduced to 1. Where the scale would be zero it is 1.

        Source: dynamic absmax quantization, arXiv 2410.05258, section 3.7.
        """
        from diffquant.recipe.numbers.absmax import computing_dtype

        return self.scale_for_largest(x.abs().amax(dim, keepdim=True).to(computing_dtype(x)), dtype)

    def scale_for_largest(self, largest: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Return the scale, as `compute_scale` computes it, for values with a known largest magnitude."""
        from diffquant.recipe.numbers.absmax import to_storable_scale

        return to_storable_scale(largest / self.largest, self.largest, dtype or largest.dtype)

    def round_scale(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Round scales, which may be negative, to the nearest values that a checkpoint can store.

        They are limited so that scale · lowest level does not overflow.
        """
        import torch

        from diffquant.recipe.numbers.absmax import to_storable_scale

        numbers = torch.finfo(dtype)
        limit = numbers.max / -self.lowest * (1 - numbers.eps)
        return to_storable_scale(scale.abs(), self.largest, dtype).clamp(max=limit).copysign(scale.to(dtype))

    def with_fitted_step(self, scale: "Tensor", dim: int) -> "NumberFormat":
        """Return this format with the step of least squared error for each group of scales along `dim`.

        Formats whose scales are free (`scales_per_step` is 1) return themselves.
        """
        del scale, dim
        return self

    def with_tensor_scale(self, largest: "Tensor") -> "NumberFormat":
        """Return this format with the tensor scale of one weight, or itself if the format has no tensor scale.

        Args:
            largest: float32 [1], the weight's largest magnitude.
        """
        del largest
        return self

    def pack_scale(self, scale: "Tensor") -> "Tensor":
        """Convert scales to their stored form."""
        return scale

    def unpack_scale(self, stored: "Tensor", tensor_scale: "Tensor | None" = None) -> "Tensor":
        """Invert `pack_scale`, given the weight's `tensor_scale` if there is one."""
        del tensor_scale
        return stored

    def encode(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        """Return the codes of the levels nearest to x / scale. Ties go to the even code.

        Args:
            x: [...] finite floats.
            scale: positive, broadcastable to x.

        Returns:
            int8, x's shape.
        """
        import torch

        from diffquant.recipe.numbers.absmax import computing_dtype

        ratio = (x.to(computing_dtype(x)) / scale).contiguous()
        levels = torch.tensor(self.levels, dtype=ratio.dtype, device=ratio.device)
        middles = (levels[1:] + levels[:-1]) / 2
        below, above = (
            torch.bucketize(ratio, middles, right=up, out_int32=True) - self.zero_index for up in (False, True)
        )
        return torch.where(below % 2 == 0, below, above).to(torch.int8)

    def levels_of(self, codes: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the levels that codes stand for."""
        import torch
        from torch.nn.functional import embedding

        levels = torch.tensor(self.levels, dtype=dtype, device=codes.device)
        # An index takes several times as long on a CPU.
        return embedding(codes.int() + self.zero_index, levels[:, None]).squeeze(-1)

    def round_to_absmax_levels_(self, ratio: "Tensor") -> "Tensor":
        """Round values, already divided by their scale, to the nearest levels in place."""
        return ratio.copy_(self.levels_of(self.encode(ratio, ratio.new_ones(())), ratio.dtype))

    def round_to_all_levels_(self, ratio: "Tensor") -> "Tensor":
        """Round values, already divided by their scale, in place to the nearest levels, also those unused by absmax."""
        return self.round_to_absmax_levels_(ratio)

    def simulate(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        """Quantize and dequantize x, of float32 or float64, with its absmax scale, which is broadcastable to it."""
        return self.round_to_absmax_levels_(x / scale) * scale

    def decode(self, codes: "Tensor", scale: "Tensor") -> "Tensor":
        """Dequantize codes: return level · scale in the scale's dtype, as every reader of a checkpoint computes it."""
        return self.levels_of(codes, scale.dtype) * scale

    @property
    def packed_dtype(self) -> "torch.dtype":
        """Dtype of the tensor of packed codes."""
        import torch

        return torch.int32

    def packed_width(self, length: int) -> int:
        """Return the number of `packed_dtype` entries that hold `length` codes."""
        from diffquant.recipe.numbers.packing import packed_words

        return packed_words(length, self.code_width)

    def pack(self, codes: "Tensor") -> "Tensor":
        """Pack codes int8 [..., n] into their stored form [..., packed_width(n)], of dtype `packed_dtype`."""
        from diffquant.recipe.numbers.packing import pack

        return pack(codes, self.code_width)

    def unpack(self, stored: "Tensor", length: int) -> "Tensor":
        """Return the codes int8 [..., length] that `pack` stored."""
        from diffquant.recipe.numbers.packing import unpack

        return unpack(stored, self.code_width, length)

    @property
    def file_dtype(self) -> "torch.dtype":
        """Dtype of a weight's packed codes in a file; as wide as `packed_dtype`."""
        return self.packed_dtype

    @property
    def layout(self) -> str:
        """Name of the packed layout in compressed-tensors, or one that only diffquant reads."""
        return f"diffquant-{self.name}"

    @property
    def is_in_compressed_tensors(self) -> bool:
        """Whether compressed-tensors can read the layout."""
        return not self.layout.startswith("diffquant-")

    @property
    def config_fields(self) -> Mapping[str, Any]:
        """Type and number of bits in a compressed-tensors config group; readers refuse folders with an unknown type."""
        return {"type": self.name}

    def __repr__(self) -> str:
        return f"format_named({self.name!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Unpickle to the registered object, of which there is one per format and process."""
        return format_named, (self.name,)


FORMATS: dict[str, NumberFormat] = {}


def register(number_format: NumberFormat) -> None:
    """Register a format, so that schemes can use its name.

    Raises:
        UsageError: the name is taken, or does not consist of lowercase letters, digits and underscores; or the levels
            are not ascending, are more than 256, or lack 0, which only formats for weights may lack.
    """
    name, levels = number_format.name, number_format.levels
    if name in FORMATS:
        raise UsageError(f"there is a format {name!r} already; give the new one another name")
    if (not name.isidentifier() and not name.isdecimal()) or name != name.lower():
        raise UsageError(f"format {name!r}: a name consists of lowercase letters, digits and underscores")
    has_zero = 0 in levels or number_format.for_weights_only
    if number_format.quantizes and (list(levels) != sorted(set(levels)) or not has_zero or len(levels) > 256):
        raise UsageError(f"format {name}: its levels must be ascending, include 0 and be at most 256 numbers")
    FORMATS[name] = number_format


def format_named(name: str) -> NumberFormat:
    """Return the format with this name.

    Raises:
        UsageError: there is no such format; the message lists all names.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown number format {name!r}; choose from {', '.join(FORMATS)}")
    return FORMATS[name]


import_all(sys.modules[__name__])
