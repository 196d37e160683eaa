"""A `Scheme` says how one kind of tensor is quantized: bits, and which entries share a scale. It needs no torch."""

import re
from dataclasses import dataclass

from diffquant.errors import UsageError
from diffquant.support.spelling import spelled
from diffquant.support.suggestion import did_you_mean

GRANULARITIES = ("tensor", "map", "head", "pair", "row", "column", "group", "block", "static")
_SIZED = {"g": "group", "c": "column", "b": "block"}
_LETTERS = {name: letter for letter, name in _SIZED.items()}
_FLAGS = ("shift", "alike", "rotated", "smooth")
# Other names of "row", by the targets whose rows they are.
_ROWS = {"channel": ("weights",), "token": ("k", "v", "logits", "qk")}
# No scheme is as long; what is would only fill the screen.
_LONGEST = 64
_GRAMMAR = "BITS[:GRANULARITY][:shift, :alike, :rotated or :smooth], such as 4:g32, 6:row, 8:head, 4:tensor:shift or 16"


@dataclass(frozen=True)
class Scheme:
    """How one kind of tensor is quantized: its bits, and which entries share one scale.

    Attributes:
        bits: width of the codes, 2 to 8, or 16 for not quantized.
        granularity: what shares a scale, one of `GRANULARITIES`; "" at 16 bits. A "row" is a token or an output
            channel, a "group" `size` neighbours along the contracted axis, a "column" a channel over `size` tokens
            (or all), a "block" a `size` x `size` tile of logits, or `size` tokens of queries and of keys, a "map" one
            map of a layer's logits over all heads, a "pair" both maps of a head; "static" is a calibrated scale a
            channel of the cache or a head of the logits.
        size: number of entries along an axis that share a scale, for "group", "column" and "block".
        shift: whether the row maximum of logits is subtracted first: all 2^bits levels then serve one side.
        alike: whether logits are rounded as the mean of both maps and half their difference, so that the
            mean's rounding error is in both maps alike; one map has none to share it with and is rounded as without.
        rotated: whether the channels of keys or values are rotated before they are rounded, which attention makes good:
            queries are rotated as keys are, and what is read of values is rotated back.
        smooth: whether keys lose their mean over a sequence's tokens before they are rounded for Q·Kᵀ, which softmax
            does not see.
    """

    bits: int
    granularity: str = ""
    size: int | None = None
    shift: bool = False
    alike: bool = False
    rotated: bool = False
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.bits == 16:
            if self.granularity or self.size or self.shift or self.alike or self.rotated or self.smooth:
                raise UsageError("16 bits means not quantized and takes no granularity")
            return
        if not 2 <= self.bits <= 8:
            raise UsageError(f"bits must be 2 to 8, or 16 for not quantized; got {self.bits}")
        if self.granularity not in GRANULARITIES:
            raise UsageError(f"unknown granularity {self.granularity!r}{did_you_mean(self.granularity, GRANULARITIES)}")
        if self.granularity in ("group", "block") and not self.size:
            raise UsageError(f"granularity {self.granularity} needs a size, such as {_LETTERS[self.granularity]}32")
        if self.alike and self.shift:
            raise UsageError("shift and alike do not combine; leave out one")
        if self.alike and self.granularity not in ("tensor", "head", "row"):
            raise UsageError(f"alike cannot be per {self.granularity}; use tensor, head or row")
        if self.size is not None and (self.granularity not in _LETTERS or self.size < 1):
            raise UsageError(f"granularity {self.granularity} takes no size {self.size}")

    @classmethod
    def parse(cls, text: str | int, default: str = "row", target: str = "") -> "Scheme":
        """Read the text form.

        Args:
            text: `BITS[:GRANULARITY][:shift, :alike, :rotated or :smooth]`.
            default: granularity where the text names none.
            target: what the scheme is for, where that is known: "weights", whose rows may be called "channel", or "k",
                "v", "logits" or "qk", whose rows may be called "token".

        Raises:
            UsageError: the text is no such form, or names the rows of another target.
        """
        if not isinstance(text, str) and type(text) is not int:
            raise UsageError(f"cannot read a scheme from a {type(text).__name__}: expected {_GRAMMAR}")
        bits, *rest = str(text).strip().lower().split(":") if len(str(text)) < _LONGEST else [""]
        if not re.fullmatch("[0-9]{1,9}", bits):
            raise UsageError(f"cannot read scheme {str(text)[:_LONGEST]!r}: {_meaning_of(bits)}expected {_GRAMMAR}")
        flags = {flag: flag in rest for flag in _FLAGS}
        names = [part for part in rest if part not in _FLAGS]
        if len(names) > 1 or len(rest) - len(names) > sum(flags.values()):
            raise UsageError(f"cannot read scheme {text!r}: expected {_GRAMMAR}")
        if int(bits) == 16:
            return cls(16, "".join(names), **flags)
        granularity, size = _parse_granularity(names[0] if names else default, str(text), target)
        return cls(int(bits), granularity, size, **flags)

    @property
    def quantizes(self) -> bool:
        return self.bits < 16

    @property
    def granularity_text(self) -> str:
        name = f"{_LETTERS[self.granularity]}{self.size}" if self.size else self.granularity
        return ":".join([name, *(flag for flag in _FLAGS if getattr(self, flag))])

    def __str__(self) -> str:
        return f"{self.bits}:{self.granularity_text}" if self.quantizes else "16"


def _meaning_of(name: str) -> str:
    """What another library's name of a scheme is here, as the start of a sentence; "" for no such name."""
    known = re.fullmatch(r"(?:w|int|uint|nf|q|iq)([2-8])(?:a16|_.*|)", name)
    if known is None:
        return ""
    return f"{known[1]}-bit weights beside 16-bit activations are {spelled('weights', f'{known[1]}:g32')} here; "


def _parse_granularity(name: str, text: str, target: str) -> tuple[str, int | None]:
    if name in _ROWS:
        if target not in _ROWS[name]:
            raise UsageError(f"cannot read scheme {text!r}: {_why_not_rows(name, target)}")
        return "row", None
    sized = re.fullmatch(r"([gcb])([0-9]{1,9})", name)
    if sized:
        return _SIZED[sized[1]], int(sized[2])
    if name not in GRANULARITIES:
        choices = (*GRANULARITIES, *_ROWS, "g32", "c64", "b64")
        raise UsageError(f"cannot read scheme {text!r}: unknown granularity {name!r}{did_you_mean(name, choices)}")
    return name, None


def _why_not_rows(name: str, target: str) -> str:
    """Why a target's rows do not have a name, and what to write."""
    if name == "channel" and target in ("k", "v"):
        return (
            "a channel of the cache has a scale for each block of tokens; for keys write c32, a scale per channel over "
            "32 tokens, and for values token, a scale per token"
        )
    rows = {"weights": "channel", "": "row"}.get(target, "token")
    return f"{target or 'a scheme by itself'} has no scale per {name}; write {rows}"


FULL = Scheme(16)
