"""A `Scheme` says how one kind of tensor is quantized: number format x what shares a scale x transforms. No torch."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from diffquant.errors import UsageError
from diffquant.recipe.numbers.formats import FORMATS, NumberFormat, format_named
from diffquant.recipe.numbers.sharing import UNSHARED, Sharing
from diffquant.support.names import option_name

if TYPE_CHECKING:
    from torch import Tensor

# No scheme is as long; what is would only fill the screen.
_LONGEST = 64


@dataclass(frozen=True)
class Transform:
    """A change of numbers before they are rounded, which attention undoes or does not notice.

    Whoever computes a target asks `Scheme.has` and has the function: `attention.logits` and `attention.operands`,
    and `model.attention` for the cache.

    Attributes:
        name: its name in a scheme: "shift" in "4:row:shift".
        targets: targets of a recipe that can have it.
        reason: what allows it for these targets, after their names.
        excludes: what it does not combine with: transforms, granularities, or "uneven levels" of a format.
        reads: tokens that one token's result depends on: itself, its whole sequence, or a tile of tokens counted from
            the first position.
    """

    name: str
    targets: tuple[str, ...]
    reason: str
    excludes: tuple[str, ...] = ()
    reads: Literal["token", "sequence", "tile"] = "token"

    def refusal(self, target: str) -> str | None:
        """Explain why a target cannot have it, or return None if it can or the target is "" (unknown)."""
        if target in ("", *self.targets):
            return None
        return f"{self.name} is for {' and '.join(self.targets)}, {self.reason}; leave it out"


# In the order in which schemes are written.
_TRANSFORMS = [
    # Subtracts each row's maximum: all 2^bits levels then serve one side.
    Transform("shift", ("logits",), "which softmax sees only up to a constant a row", ("static", "uneven levels")),
    # Rounds the mean of both maps and half their difference, so that the mean's rounding error is in both maps alike.
    # One map has none to share it with and is rounded as without.
    Transform("alike", ("logits",), "which have two maps", ("shift", "static", "map", "pair", "group", "block")),
    # Rotates channels: queries are rotated as keys are, and what is read of values is rotated back.
    Transform("rotated", ("k", "v", "qk"), "whose channels attention can rotate back", ("static",)),
    # Subtracts the keys' mean over a sequence's tokens, which softmax does not see.
    Transform("smooth", ("qk",), "which may lose its means before Q·Kᵀ", reads="sequence"),
    # Subtracts the queries' mean over 128 tokens; the mean's own product with the keys is added exactly.
    Transform("smoothq", ("qk",), "which may lose its means before Q·Kᵀ", reads="tile"),
    # Makes the scale the largest power of two that the largest level allows; only that of a row is known beforehand.
    Transform("pow2", ("p",), "softmax weights with a known largest value", ("group",)),
    # Divides by the sum of the unrounded weights, as published kernels do, in place of the sum of the rounded ones.
    Transform("fullsum", ("p",), "softmax weights that are divided by their sum"),
]
TRANSFORMS = {each.name: each for each in _TRANSFORMS}


@dataclass(frozen=True)
class Scheme:
    """How one kind of tensor is quantized: the format of its codes, which entries share one scale, and transforms.

    Attributes:
        format: number format of the codes; 16 bits for not quantized.
        sharing: what shares a scale; none at 16 bits.
        transforms: what is done to numbers before they are rounded, in the order of `TRANSFORMS`.
    """

    format: NumberFormat
    sharing: Sharing = UNSHARED
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        made_of = isinstance(self.format, NumberFormat), isinstance(self.sharing, Sharing)
        if not all((*made_of, *(isinstance(each, Transform) for each in self.transforms))):
            stated = ":".join(str(each) for each in (self.format, self.sharing) if each != UNSHARED)
            raise UsageError(f"a Scheme is NumberFormat, Sharing and Transforms; Scheme.parse({stated!r}) reads text")
        if not self.format.quantizes:
            if self.sharing != UNSHARED or self.transforms:
                raise UsageError("16 bits means not quantized and takes no granularity")
            return
        if self.format.block and self.sharing != Sharing("group", self.format.block):
            name = self.format.name
            raise UsageError(f"{name} has a scale for {self.format.block} neighbours and takes no other; write {name}")
        if self.sharing == UNSHARED:
            raise UsageError(f"{self.format.name} needs a granularity, such as {self.format.name}:row")
        names = (each.name for each in self.transforms)
        beside = {*names, self.granularity, "" if self.format.is_even else "uneven levels"}
        for each in self.transforms:
            if others := [other for other in each.excludes if other in beside]:
                raise UsageError(f"{each.name} and {others[0]} do not combine in {self}; leave out one")

    @classmethod
    def parse(cls, text: str | int, default: str = "row", target: str = "") -> "Scheme":
        """Read the text form.

        Args:
            text: `FORMAT[:GRANULARITY]` and the names of transforms such as `:shift`; a format is 2 to 8 for integers
                of so many bits, 16, or the name of another one.
            default: granularity where the text names none.
            target: what the scheme is for, where that is known: "weights", whose rows may be called "channel", or "k",
                "v", "logits", "qk", "p", "pv" or "activations", whose rows may be called "token".

        Raises:
            UsageError: the text is no such form, or names the rows of another target.
        """
        if not isinstance(text, str) and type(text) is not int:
            raise UsageError(f"cannot read a scheme from a {type(text).__name__}: expected {_grammar(target)}")
        name, *rest = str(text).strip().lower().split(":") if len(str(text)) < _LONGEST else [""]
        name = "e4m3" if name == "fp8" else name
        name = str(int(name)) if re.fullmatch("[0-9]{1,9}", name) else name
        if name not in FORMATS:
            raise UsageError(_unknown_format(name, str(text), target))
        transforms = tuple(each for name, each in TRANSFORMS.items() if name in rest)
        names = [part for part in rest if part not in TRANSFORMS]
        if len(names) > 1 or len(rest) - len(names) > len(transforms):
            raise UsageError(f"cannot read scheme {text!r}: expected {_grammar(target)}")
        if refusals := [refusal for each in transforms if (refusal := each.refusal(target))]:
            raise UsageError("; ".join(refusals))
        number_format = format_named(name)
        if not number_format.quantizes and not names:
            return cls(number_format, UNSHARED, transforms)
        if number_format.block:
            default = f"g{number_format.block}"
        try:
            sharing = Sharing.parse(names[0] if names else default, target)
        except UsageError as error:
            raise UsageError(f"cannot read scheme {str(text)!r}: {error}") from error
        return cls(number_format, sharing, transforms)

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

    def has(self, transform: str) -> bool:
        """Return whether it has the transform with a name of `TRANSFORMS`."""
        return TRANSFORMS[transform] in self.transforms

    @property
    def by_token(self) -> bool:
        """Whether no scale and no transform spans tokens."""
        return self.sharing.by_token and all(each.reads == "token" for each in self.transforms)

    @property
    def granularity_text(self) -> str:
        return ":".join([str(self.sharing), *(each.name for each in self.transforms)])

    def __str__(self) -> str:
        # What a format settles by itself need not be said.
        granularity = (
            self.granularity_text.removeprefix(str(self.sharing)) if self.format.block else ":" + self.granularity_text
        )
        return self.format.name + granularity if self.quantizes else self.format.name

    def bound_to(self, largest: "Tensor") -> "Scheme":
        """Return the scheme of one weight whose largest magnitude is known, float32 [1]."""
        return replace(self, format=self.format.bound_to(largest))


def _grammar(target: str) -> str:
    """Describe how a scheme is written, with the transforms that its target can have."""
    transforms = [f"[:{each.name}]" for each in TRANSFORMS.values() if not each.refusal(target)]
    return f"FORMAT[:GRANULARITY]{''.join(transforms)}, such as 4:g32, 6:row, nvfp4 or 16"


def _unknown_format(name: str, text: str, target: str) -> str:
    """Why a scheme's format is not known, and what to write."""
    if re.fullmatch("[0-9]{1,9}", name):
        return f"bits must be 2 to 8, or 16 for not quantized; got {name}"
    named = [known for known in FORMATS if not known.isdecimal()]
    others = f"; other formats are {', '.join(named)}" if named else ""
    return f"cannot read scheme {text[:_LONGEST]!r}: {_meaning_of(name)}expected {_grammar(target)}{others}"


def _meaning_of(name: str) -> str:
    """Translate another library's name of a scheme, as the start of a sentence; "" for an unknown name."""
    if name in ("float8", "f8"):
        return "8-bit floats are e4m3 here; "
    if name in ("gptq", "awq", "autoround", "hqq"):
        return f"it is a way to round and no format: {option_name('effort', 'balanced')} reads a text as GPTQ does; "
    known = re.fullmatch(r"(?:w|int|uint|nf|q|iq)([2-8])(?:a16|_.*|)", name)
    if known is None:
        return ""
    return f"{known[1]}-bit weights beside 16-bit activations are {option_name('weights', f'{known[1]}:g32')} here; "


FULL = Scheme(format_named("16"))
