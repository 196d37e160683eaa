"""`Scheme`: how one kind of tensor is quantized, as number format, granularity and transforms. Imports no torch."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from diffquant.errors import UsageError
from diffquant.recipe.numbers.formats import FORMATS, NumberFormat, format_named
from diffquant.recipe.numbers.sharing import UNSHARED, Granularity
from diffquant.support.names import option_name

if TYPE_CHECKING:
    from torch import Tensor

# No scheme is this long, and longer text would fill the screen.
_LONGEST = 64


@dataclass(frozen=True)
class Transform:
    """A change to a tensor before rounding that attention undoes, or that does not change attention's result.

    This is only its description. The code that computes a target checks `Scheme.has_transform` and applies the
    transform: `attention.logits`, `attention.operands`, and `model.attention` for the cache.

    Attributes:
        name: name in a scheme: "shift" in "4:row:shift".
        targets: targets of a recipe that support it.
        reason: clause that explains why only these targets support it, appended to their names in an error.
        excludes: transforms and granularities that it cannot be combined with, or "uneven levels" for all formats
            that are not `has_integer_levels`.
        reads: tokens that one token's result depends on: only itself, its whole sequence, or a fixed tile of tokens
            that starts at a multiple of the tile's length.
    """

    name: str
    targets: tuple[str, ...]
    reason: str
    excludes: tuple[str, ...] = ()
    reads: Literal["token", "sequence", "tile"] = "token"

    def refusal(self, target: str) -> str | None:
        """Explain why a target does not support this transform; return None if it does, or if it is "" (unknown)."""
        if target in ("", *self.targets):
            return None
        return f"{self.name} is for {' and '.join(self.targets)}, {self.reason}; leave it out"


# In the order in which schemes are written.
_TRANSFORMS = [
    # Subtracts each row's maximum, so that all 2^bits levels cover one sign.
    Transform("shift", ("logits",), "where softmax ignores a constant per row", ("static", "uneven levels")),
    # Rounds the mean of both maps and half their difference, so that both maps have the mean's rounding error.
    # A model with one map is rounded as without it.
    Transform("alike", ("logits",), "which have two maps", ("shift", "static", "map", "pair", "group", "block")),
    # Rotates channels. Queries are rotated like keys, and the output read from values is rotated back.
    Transform("rotated", ("k", "v", "qk"), "whose channels attention can rotate back", ("static",)),
    # Subtracts the keys' mean over a sequence's tokens, which does not change softmax.
    Transform("smooth", ("qk",), "whose means can be subtracted before Q·Kᵀ", reads="sequence"),
    # Subtracts the queries' mean over 128 tokens; the mean's product with the keys is added back exactly.
    Transform("smoothq", ("qk",), "whose means can be subtracted before Q·Kᵀ", reads="tile"),
    # Makes the scale a power of two. Only a row's largest softmax weight is known beforehand.
    Transform("pow2", ("p",), "softmax weights with a known largest value", ("group",)),
    # Divides by the sum of the unrounded weights, as published kernels do, instead of the rounded ones.
    Transform("fullsum", ("p",), "only softmax weights are divided by a sum"),
]
TRANSFORMS = {each.name: each for each in _TRANSFORMS}


@dataclass(frozen=True)
class Scheme:
    """How one kind of tensor is quantized: number format, granularity and transforms.

    Attributes:
        format: number format of the codes; the 16-bit format means not quantized.
        sharing: granularity; `UNSHARED` at 16 bits.
        transforms: transforms applied before rounding, in the order of `TRANSFORMS`.
    """

    format: NumberFormat
    sharing: Granularity = UNSHARED
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        made_of = isinstance(self.format, NumberFormat), isinstance(self.sharing, Granularity)
        if not all((*made_of, *(isinstance(each, Transform) for each in self.transforms))):
            stated = ":".join(str(each) for each in (self.format, self.sharing) if each != UNSHARED)
            raise UsageError(
                f"a Scheme takes a NumberFormat, a Granularity and Transforms; to read text use "
                f"Scheme.parse({stated!r})"
            )
        if not self.format.quantizes:
            if self.sharing != UNSHARED or self.transforms:
                raise UsageError("16 bits means not quantized and takes no granularity; leave it out")
            return
        if self.format.block and self.sharing != Granularity("group", self.format.block):
            name = self.format.name
            raise UsageError(f"{name} has one scale per {self.format.block} values; leave out the granularity: {name}")
        if self.sharing == UNSHARED:
            raise UsageError(f"{self.format.name} needs a granularity, such as {self.format.name}:row")
        names = (each.name for each in self.transforms)
        beside = {*names, self.granularity, "" if self.format.has_integer_levels else "uneven levels"}
        for each in self.transforms:
            if others := [other for other in each.excludes if other in beside]:
                raise UsageError(f"{each.name} and {others[0]} cannot be combined in {self}; leave out one")

    @classmethod
    def parse(cls, text: str | int, default: str = "row", target: str = "") -> "Scheme":
        """Parse a scheme's text form, such as "4:g32".

        Args:
            text: `FORMAT[:GRANULARITY][:TRANSFORM]...`. FORMAT is 2 to 8 for integers with that many bits, 16, or the
                name of another format such as nvfp4.
            default: granularity if the text has none.
            target: the target that is quantized, such as "weights", or "" if unknown. It decides what the granularities
                "channel" and "token" mean, see `Granularity.parse`.

        Raises:
            UsageError: the text is not a scheme, or the target does not support its transform, "channel" or "token".
        """
        if not isinstance(text, str) and type(text) is not int:
            raise UsageError(f"cannot read a scheme from a {type(text).__name__}: expected {_grammar(target)}")
        name, *rest = str(text).strip().lower().split(":") if len(str(text)) < _LONGEST else [""]
        name = "e4m3" if name in ("fp8", "float8") else name
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
            sharing = Granularity.parse(names[0] if names else default, target)
        except UsageError as error:
            raise UsageError(f"cannot read scheme {str(text)!r}: {error}") from error
        return cls(number_format, sharing, transforms)

    @property
    def quantizes(self) -> bool:
        return self.format.quantizes

    @property
    def bits(self) -> int:
        """Number of bits of an integer format's codes; 16 if not quantized.

        Raises:
            UsageError: the format is not an integer format.
        """
        return self.format.bits

    @property
    def granularity(self) -> str:
        """Name of the granularity; "" at 16 bits."""
        return self.sharing.name

    @property
    def granularity_size(self) -> int | None:
        """The number in a granularity such as g32, or None if the granularity has none."""
        return self.sharing.size

    def has_transform(self, transform: str) -> bool:
        """Return whether the scheme has this transform, a key of `TRANSFORMS`."""
        return TRANSFORMS[transform] in self.transforms

    @property
    def is_token_local(self) -> bool:
        """Whether no scale and no transform is computed from several tokens."""
        return self.sharing.is_token_local and all(each.reads == "token" for each in self.transforms)

    @property
    def granularity_text(self) -> str:
        return ":".join([str(self.sharing), *(each.name for each in self.transforms)])

    def __str__(self) -> str:
        # A format with a fixed block implies its granularity.
        granularity = (
            self.granularity_text.removeprefix(str(self.sharing)) if self.format.block else ":" + self.granularity_text
        )
        return self.format.name + granularity if self.quantizes else self.format.name

    def with_tensor_scale(self, largest: "Tensor") -> "Scheme":
        """Return this scheme with the tensor scale of one weight, or itself if its format has no tensor scale.

        Args:
            largest: float32 [1], the weight's largest magnitude.
        """
        return replace(self, format=self.format.with_tensor_scale(largest))


def _grammar(target: str) -> str:
    """Describe how a scheme is written, with the transforms that the target supports."""
    transforms = [f"[:{each.name}]" for each in TRANSFORMS.values() if not each.refusal(target)]
    return f"FORMAT[:GRANULARITY]{''.join(transforms)}, such as 4:g32, 6:row, nvfp4 or 16"


def _unknown_format(name: str, text: str, target: str) -> str:
    """Explain why a scheme's format is unknown, and what to write."""
    if re.fullmatch("[0-9]{1,9}", name):
        return f"bits must be 2 to 8, or 16 for not quantized; got {name}"
    others = ", ".join(known for known in FORMATS if not known.isdecimal())
    explained = explain_foreign_name(name) or f"expected {_grammar(target)}; other formats are {others}"
    return f"cannot read scheme {text[:_LONGEST]!r}: {explained}"


def explain_foreign_name(name: str) -> str:
    """Explain how to write another library's name of a scheme here; "" for an unknown name."""
    name = name.lower()
    if name in ("gptq", "awq", "autoround", "hqq"):
        return f"{name} is a rounding, not a format: use {option_name('effort', 'balanced')} for GPTQ"
    if joined := re.fullmatch(r"w?([2-8])(g[0-9]+|row|channel|tensor)", name):
        return f"did you mean {joined[1]}:{joined[2]}?"
    known = re.fullmatch(r"(?:w|int|uint|nf|q|iq)([2-8])(a16|_.*|)", name)
    if known is None:
        return ""
    bits, option = known[1], option_name("weights", f"{known[1]}:g32")
    if name.startswith("nf"):
        return f"{name} is not supported; the nearest is {option}"
    groups = f" ({bits}:g128 with llm-compressor's groups)" if known[2] == "a16" else ""
    return f"{bits}-bit weights with 16-bit activations are {option} here{groups}"


FULL = Scheme(format_named("16"))
