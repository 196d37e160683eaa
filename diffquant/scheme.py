"""A `Scheme` says how one kind of tensor is quantized: number format x what shares a scale x transform. No torch."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.numbers.formats import FORMATS, NumberFormat, format_named
from diffquant.numbers.sharing import UNSHARED, Sharing
from diffquant.support.spelling import spelled

if TYPE_CHECKING:
    from torch import Tensor

_FLAGS = ("shift", "alike", "rotated", "smooth", "smoothq", "pow2", "fullsum")
# No scheme is as long; what is would only fill the screen.
_LONGEST = 64
_GRAMMAR = (
    "FORMAT[:GRANULARITY][:shift, :alike, :rotated, :smooth, ...], such as 4:g32, 6:row, 8:head, 4:tensor:shift, nvfp4 "
    "or 16"
)


@dataclass(frozen=True)
class Scheme:
    """How one kind of tensor is quantized: the format of its codes, and which entries share one scale.

    Attributes:
        format: number format of the codes; 16 bits for not quantized.
        sharing: what shares a scale; none at 16 bits.
        shift: whether the row maximum of logits is subtracted first: all 2^bits levels then serve one side.
        alike: whether logits are rounded as the mean of both maps and half their difference, so that the
            mean's rounding error is in both maps alike; one map has none to share it with and is rounded as without.
        rotated: whether the channels of keys or values are rotated before they are rounded, which attention makes good:
            queries are rotated as keys are, and what is read of values is rotated back.
        smooth: whether keys lose their mean over a sequence's tokens before they are rounded for Q·Kᵀ, which softmax
            does not see.
        smoothq: whether queries lose their mean over 128 tokens before they are rounded for Q·Kᵀ; the mean's own
            product with the keys is added exactly.
        pow2: whether the scale of softmax weights is the largest power of two that their largest level allows.
        fullsum: whether softmax weights are divided by the sum of the unrounded ones, as published kernels do, in
            place of the sum of the rounded ones.
    """

    format: NumberFormat
    sharing: Sharing = UNSHARED
    shift: bool = False
    alike: bool = False
    rotated: bool = False
    smooth: bool = False
    smoothq: bool = False
    pow2: bool = False
    fullsum: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, NumberFormat) or not isinstance(self.sharing, Sharing):
            stated = ":".join(str(each) for each in (self.format, self.sharing) if each != UNSHARED)
            raise UsageError(f"a Scheme is made of a NumberFormat and a Sharing; Scheme.parse({stated!r}) reads text")
        flags = [flag for flag in _FLAGS if getattr(self, flag)]
        if not self.format.quantizes:
            if self.sharing != UNSHARED or flags:
                raise UsageError("16 bits means not quantized and takes no granularity")
            return
        if self.format.block and self.sharing != Sharing("group", self.format.block):
            name = self.format.name
            raise UsageError(f"{name} has a scale for {self.format.block} neighbours and takes no other; write {name}")
        if self.sharing == UNSHARED:
            raise UsageError(f"{self.format.name} needs a granularity, such as {self.format.name}:row")
        if self.alike and self.shift:
            raise UsageError("shift and alike do not combine; leave out one")
        if self.alike and not self.sharing.serves_alike:
            raise UsageError(f"alike cannot be per {self.granularity}; use tensor, head or row")
        if self.shift and not self.format.is_even:
            raise UsageError(f"shift counts even steps from the row's maximum, and {self.format.name} has others")

    @classmethod
    def parse(cls, text: str | int, default: str = "row", target: str = "") -> "Scheme":
        """Read the text form.

        Args:
            text: `FORMAT[:GRANULARITY]` and the names of transforms such as `:shift`; a format is 2 to 8 for integers
                of so many bits, 16, or the name of another one.
            default: granularity where the text names none.
            target: what the scheme is for, where that is known: "weights", whose rows may be called "channel", or "k",
                "v", "logits", "qk", "p" or "pv", whose rows may be called "token".

        Raises:
            UsageError: the text is no such form, or names the rows of another target.
        """
        if not isinstance(text, str) and type(text) is not int:
            raise UsageError(f"cannot read a scheme from a {type(text).__name__}: expected {_GRAMMAR}")
        name, *rest = str(text).strip().lower().split(":") if len(str(text)) < _LONGEST else [""]
        name = str(int(name)) if re.fullmatch("[0-9]{1,9}", name) else name
        if name not in FORMATS:
            raise UsageError(_unknown_format(name, str(text)))
        flags = {flag: flag in rest for flag in _FLAGS}
        names = [part for part in rest if part not in _FLAGS]
        if len(names) > 1 or len(rest) - len(names) > sum(flags.values()):
            raise UsageError(f"cannot read scheme {text!r}: expected {_GRAMMAR}")
        number_format = format_named(name)
        if not number_format.quantizes and not names:
            return cls(number_format, UNSHARED, **flags)
        if number_format.block:
            default = f"g{number_format.block}"
        try:
            sharing = Sharing.parse(names[0] if names else default, target)
        except UsageError as error:
            raise UsageError(f"cannot read scheme {str(text)!r}: {error}") from error
        return cls(number_format, sharing, **flags)

    @property
    def quantizes(self) -> bool:
        return self.format.quantizes

    @property
    def bits(self) -> int:
        """Width of an integer's codes, or 16.

        Raises:
            UsageError: the format is no integer.
        """
        return self.format.bits

    @property
    def granularity(self) -> str:
        """Name of what shares a scale; "" at 16 bits."""
        return self.sharing.name

    @property
    def size(self) -> int | None:
        """Number of entries along an axis that share a scale, where the granularity has a size."""
        return self.sharing.size

    @property
    def granularity_text(self) -> str:
        return ":".join([str(self.sharing), *(flag for flag in _FLAGS if getattr(self, flag))])

    def __str__(self) -> str:
        # What a format settles by itself need not be said.
        granularity = (
            self.granularity_text.removeprefix(str(self.sharing)) if self.format.block else ":" + self.granularity_text
        )
        return self.format.name + granularity if self.quantizes else self.format.name

    def bound_to(self, largest: "Tensor") -> "Scheme":
        """The scheme of one weight whose largest magnitude is known, float32 [1]."""
        return replace(self, format=self.format.bound_to(largest))


def _unknown_format(name: str, text: str) -> str:
    """Why a scheme's format is not known, and what to write."""
    if re.fullmatch("[0-9]{1,9}", name):
        return f"bits must be 2 to 8, or 16 for not quantized; got {name}"
    named = [known for known in FORMATS if not known.isdecimal()]
    others = f"; other formats are {', '.join(named)}" if named else ""
    return f"cannot read scheme {text[:_LONGEST]!r}: {_meaning_of(name)}expected {_GRAMMAR}{others}"


def _meaning_of(name: str) -> str:
    """Translate another library's name of a scheme, as the start of a sentence; "" for an unknown name."""
    if name in ("fp8", "float8", "f8"):
        return "8-bit floats are e4m3 here; "
    if name in ("gptq", "awq", "autoround", "hqq"):
        return f"it is a way to round and no format: {spelled('effort', 'balanced')} reads a text as GPTQ does; "
    known = re.fullmatch(r"(?:w|int|uint|nf|q|iq)([2-8])(?:a16|_.*|)", name)
    if known is None:
        return ""
    return f"{known[1]}-bit weights beside 16-bit activations are {spelled('weights', f'{known[1]}:g32')} here; "


FULL = Scheme(format_named("16"))
