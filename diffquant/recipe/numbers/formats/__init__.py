"""The noun `NumberFormat`: which numbers a scale multiplies, and how their codes become bytes; one family a file.

Files of formats import torch inside of methods, since the command line reads schemes without it.
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
    """A number format: a value is read back as a level times a scale.

    A level's code is its place in `levels`, counted from zero's; where levels are whole numbers without a gap, codes
    are the levels themselves. What a format does not override follows from its name and levels.

    Attributes:
        name: name that schemes give it: "4" in "4:g32".
        levels: numbers that codes stand for, ascending, 0 among them; at most 256.
        quantizes: whether it rounds anything; only 16 bits do not.
        block: number of neighbours that share a scale, if the format fixes it, or None if a scheme does.
        spans_tensor: whether a weight's scales depend on the largest magnitude of the whole weight.
        fits_errors: whether scales are chosen by the errors that they leave, so that magnitudes alone do not tell them.
        trials: shares of the absmax scale that a rounding with fitted scales tries, where not by bits.
        has_tiles: whether a weight's scales may be of square blocks, in which its layout has it.
    """

    name: str
    levels: tuple[float, ...]
    quantizes: ClassVar[bool] = True
    block: ClassVar[int | None] = None
    spans_tensor: ClassVar[bool] = False
    fits_errors: ClassVar[bool] = False
    trials: ClassVar[tuple[float, ...]] = ()
    has_tiles: ClassVar[bool] = False

    # Plain properties: a cached one takes a lock, which torch.compile cannot trace.
    @property
    def largest(self) -> float:
        """Level that absmax maps the largest magnitude to."""
        return self.levels[-1]

    @property
    def lowest(self) -> float:
        """Lowest level, which scales that need not be symmetric may use."""
        return self.levels[0]

    @property
    def reach(self) -> float:
        """Largest magnitude, in scales, that is not clipped: half a step beyond the last level."""
        return self.largest + (self.largest - self.levels[-2]) / 2

    @property
    def steps(self) -> int:
        """Number of steps from the lowest to the last level: codes of one side where all levels serve that."""
        return len(self.levels) - 1

    @cached_property
    def is_even(self) -> bool:
        """Whether codes are the levels themselves, so that codes can be computed with."""
        return self.levels == tuple(range(int(self.lowest), int(self.largest) + 1))

    @property
    def code_width(self) -> int:
        """Bits that tell all codes apart."""
        return self.steps.bit_length()

    @property
    def integer_refusal(self) -> str | None:
        """Why a reader of integers, such as a kernel, cannot have this format, in one sentence, or None if it can."""
        return f"{self.name} is not an integer format of 2 to 8 bits, the only kind supported here; use one, such as 4"

    @property
    def bits(self) -> int:
        """Width of an integer's codes, or 16.

        Raises:
            UsageError: this is not an integer format.
        """
        raise UsageError(self.integer_refusal or "")

    # What a scale is.

    def scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":
        """Dtype in which scales are stored of a weight that would itself be stored in `dtype`: 16 bits in any case.

        A half type is its own. For wider types it is bfloat16, which has float32's range, so that no scale is lost, and
        whose numbers float16 and float32 hold exactly: readers turn scales into the dtype in which they run.
        """
        import torch

        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16

    def stored_scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":
        """Dtype of the tensor that a weight's scales are stored in, where the weight would be stored in `dtype`."""
        return self.scale_dtype(dtype)

    def reads_scale(self, dtype: "torch.dtype") -> bool:
        """Return whether a checkpoint's scales may have a dtype."""
        return dtype.is_floating_point and dtype.itemsize > 1

    def scale(self, x: "Tensor", dim: "Axes", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Scale that maps the largest magnitude along `dim`, which keeps size 1, to the largest level.

        Args:
            x: [...] finite floats.
            dim: axes that share one scale.
            dtype: dtype of the scale, for a format whose scales may be of any.

        Returns:
            `x`'s shape with `dim` reduced to 1. Where all of x is zero, or so small that the scale would be, it is 1.

        Source: dynamic absmax quantization, arXiv 2410.05258, section 3.7.
        """
        from diffquant.recipe.numbers.absmax import compute_dtype

        return self.scale_of(x.abs().amax(dim, keepdim=True).to(compute_dtype(x)), dtype)

    def scale_of(self, largest: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Scale for entries whose largest magnitude is known, as `scale` makes it."""
        from diffquant.recipe.numbers.absmax import storable_scale

        return storable_scale(largest / self.largest, self.largest, dtype or largest.dtype)

    def storable(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Scale that can be stored next to one that a rounding found, of either sign.

        It is no larger than what the lowest code can multiply.
        """
        import torch

        from diffquant.recipe.numbers.absmax import storable_scale

        numbers = torch.finfo(dtype)
        limit = numbers.max / -self.lowest * (1 - numbers.eps)
        return storable_scale(scale.abs(), self.largest, dtype).clamp(max=limit).copysign(scale.to(dtype))

    def bound_to(self, largest: "Tensor") -> "NumberFormat":
        """Return the format of one weight with a known largest magnitude, float32 [1]; often the format itself."""
        del largest
        return self

    @property
    def tensor_scale(self) -> "Tensor | None":
        """Number [1] that a bound format stores beside a weight's scales, or None if it has one kind of scale."""
        return None

    def pack_scale(self, scale: "Tensor") -> "Tensor":
        """Scales as they are stored: bytes, or as they are."""
        return scale

    def unpack_scale(self, stored: "Tensor", tensor_scale: "Tensor | None" = None) -> "Tensor":
        """Scales of what `pack_scale` gave, and of a weight's `tensor_scale` where there is one."""
        del tensor_scale
        return stored

    # Values and codes.

    def codes(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        """Codes of the levels nearest to x / scale; of two as near, the one whose code is even.

        Args:
            x: [...] finite floats.
            scale: positive, broadcastable to x.

        Returns:
            int8, x's shape.
        """
        import torch

        from diffquant.recipe.numbers.absmax import compute_dtype

        ratio = (x.to(compute_dtype(x)) / scale).contiguous()
        levels = torch.tensor(self.levels, dtype=ratio.dtype, device=ratio.device)
        middles = (levels[1:] + levels[:-1]) / 2
        zero = self.levels.index(0)
        below, above = (torch.bucketize(ratio, middles, right=up, out_int32=True) - zero for up in (False, True))
        return torch.where(below % 2 == 0, below, above).to(torch.int8)

    def values(self, codes: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Levels of codes, in a dtype."""
        import torch

        levels = torch.tensor(self.levels, dtype=dtype, device=codes.device)
        return levels[codes.long() + self.levels.index(0)]

    def round_to_levels_(self, ratio: "Tensor") -> "Tensor":
        """Round values over their scale to the nearest levels, in place."""
        return ratio.copy_(self.values(self.codes(ratio, ratio.new_ones(())), ratio.dtype))

    def nearest_(self, ratio: "Tensor") -> "Tensor":
        """Round to the nearest of all levels in place, including those that absmax leaves unused."""
        return self.round_to_levels_(ratio)

    def decode(self, codes: "Tensor", scale: "Tensor") -> "Tensor":
        """Levels times their scale, in the scale's dtype: what a reader of the checkpoint computes."""
        return self.values(codes, scale.dtype) * scale

    # Codes and bytes.

    @property
    def stored_dtype(self) -> "torch.dtype":
        """Dtype of the tensor that packed codes are stored in."""
        import torch

        return torch.int32

    def stored_width(self, length: int) -> int:
        """Return number of entries of `stored_dtype` that `length` codes take."""
        from diffquant.recipe.numbers.packing import packed_words

        return packed_words(length, self.code_width)

    def pack(self, codes: "Tensor") -> "Tensor":
        """Codes int8 [..., n] as they are stored, [..., stored_width(n)]."""
        from diffquant.recipe.numbers.packing import pack

        return pack(codes, self.code_width)

    def unpack(self, stored: "Tensor", length: int) -> "Tensor":
        """Return the codes int8 [..., length] that `pack` stored."""
        from diffquant.recipe.numbers.packing import unpack

        return unpack(stored, self.code_width, length)

    # How a checkpoint holds it, and how its config.json says so.

    # Whether a weight's codes are stored as the weight itself, in a dtype that has them.
    is_native: ClassVar[bool] = False

    @property
    def file_dtype(self) -> "torch.dtype":
        """Dtype under which a weight's packed codes stand in a file; as wide as `stored_dtype`."""
        return self.stored_dtype

    @property
    def stores_shape(self) -> bool:
        """Whether a weight's shape is stored beside it, since that of its packed codes does not tell it."""
        return True

    @property
    def layout(self) -> str:
        """Name of the layout of packed weights: a format of compressed-tensors, or one that no other reader knows."""
        return f"diffquant-{self.name}"

    @property
    def is_standard(self) -> bool:
        """Whether readers of compressed-tensors open the layout."""
        return not self.layout.startswith("diffquant-")

    @property
    def description(self) -> Mapping[str, Any]:
        """The entry `weights` of a config group; readers that do not know its type refuse the folder."""
        return {"type": self.name}

    def strategy(self, granularity: str) -> str:
        """compressed-tensors' name of what shares a scale of a weight."""
        return {"row": "channel"}.get(granularity, granularity)

    def account(self) -> Mapping[str, Any]:
        """Return the entry of diffquant.json on a packed tensor's format."""
        return {"format": self.name}

    def __repr__(self) -> str:
        return f"format_named({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """There is one object a format, in each process that a scheme travels to."""
        return format_named, (self.name,)


FORMATS: dict[str, NumberFormat] = {}


def register(number_format: NumberFormat) -> None:
    """Let schemes name a format.

    Raises:
        UsageError: another one has its name, or its name or levels cannot be.
    """
    name, levels = number_format.name, number_format.levels
    if name in FORMATS:
        raise UsageError(f"there is a format {name!r} already; give the new one another name")
    if (not name.isidentifier() and not name.isdecimal()) or name != name.lower():
        raise UsageError(f"format {name!r}: a name is of small letters, digits and underscores, as schemes spell it")
    if number_format.quantizes and (list(levels) != sorted(set(levels)) or 0 not in levels or len(levels) > 256):
        raise UsageError(f"format {name}: its levels must ascend, hold 0 and be 256 at most")
    FORMATS[name] = number_format


def format_named(name: str) -> NumberFormat:
    """Return the format that has a name.

    Raises:
        UsageError: there is none; all are named.
    """
    if name not in FORMATS:
        raise UsageError(f"unknown number format {name!r}; known are {', '.join(FORMATS)}")
    return FORMATS[name]


import_all(sys.modules[__name__])
