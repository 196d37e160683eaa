"""Granularities: which values share one scale, which targets allow it, and the shapes of scales. Imports no torch.

One scale covers:

- "tensor": a whole weight, or one sequence's logits in a layer. "map": one map of these logits, over all heads.
- "head": one head of one map. "pair": both maps of a head.
- "row": an output channel of a weight, a token of a cache or of activations, or a query of logits.
- "group": `size` neighbours along the contracted axis (tokens of a channel, for values that weights multiply).
- "column": a channel over `size` tokens, or over all.
- "block": a `size` x `size` tile of a weight or of logits, or `size` tokens of queries, keys and values.
- "warp": 32 queries and 64 keys. "thread": every eighth of those queries and two in eight of those keys, as in
  SageAttention's kernels.
- "static": a channel of the cache or a head of the logits, with a calibrated scale.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.support.names import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.recipe.numbers.absmax import Axes

# The targets that each granularity supports.
_TARGETS = {
    "tensor": ("weights", "logits", "qk", "pv"),
    "map": ("logits",),
    "head": ("logits", "qk", "pv"),
    "pair": ("logits",),
    "row": ("weights", "k", "v", "logits", "qk", "p", "pv", "activations"),
    "group": ("weights", "k", "v", "logits", "qk", "p", "pv", "activations"),
    "column": ("k", "pv"),
    "block": ("weights", "logits", "qk", "pv"),
    "warp": ("qk",),
    "thread": ("qk",),
    "static": ("k", "v", "logits"),
}
# Axes along which the entries of one tensor [..., rows, columns] share a scale; with a size, `size` neighbours.
_AXES: "dict[str, Axes]" = {"head": (-2, -1), "row": -1, "group": -1, "column": -2}
# Axes of [B, heads, rows, columns], besides the last, that share one scale within a sequence.
_LEADING = {"tensor": (1, 2), "map": (1, 2), "head": (2,), "pair": (2,)}
_LETTERS = {"group": "g", "column": "c", "block": "b"}
# Other names of "row", by the targets whose rows they are.
_ROWS = {"channel": ("weights",), "token": ("k", "v", "logits", "qk", "p", "pv", "activations")}


@dataclass(frozen=True)
class Granularity:
    """A granularity: which values share one scale.

    Attributes:
        name: a granularity listed in this module's docstring, or "" for 16 bits, which have no scale.
        size: number of entries along an axis, for "group", "column" and "block".
    """

    name: str
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not (self.size is None or type(self.size) is int):
            raise UsageError(
                f"a Granularity takes its name and a whole number or None; got {self.name!r} and "
                f"{self.size!r}; to read text use Granularity.parse('g32')"
            )
        if self.name not in ("", *_TARGETS):
            choices = (*_TARGETS, *_ROWS, "g32", "c64", "b64")
            raise UsageError(f"unknown granularity {self.name!r}{did_you_mean(self.name, choices)}")
        if self.name in ("group", "block") and not self.size:
            raise UsageError(f"granularity {self.name} needs a size, such as {_LETTERS[self.name]}32")
        if self.size is not None and (self.name not in _LETTERS or self.size < 1):
            raise UsageError(f"granularity {self.name} takes no size {self.size}")

    @classmethod
    def parse(cls, text: str, target: str = "") -> "Granularity":
        """Parse a granularity as written in schemes: "row", "g32".

        Args:
            target: the target that is quantized, or "" if unknown. "channel" means "row" for "weights", and "column"
                for "pv". "token" means "row" for all targets except "weights".

        Raises:
            UsageError: there is no granularity with this name, or the target has no "channel" or "token".
        """
        if (text, target) == ("channel", "pv"):
            return cls("column")
        if text in _ROWS:
            if target not in _ROWS[text]:
                raise UsageError(_why_not_rows(text, target))
            return cls("row")
        sized = re.fullmatch(r"([gcb])([0-9]{1,9})", text)
        if sized:
            return cls(next(name for name, letter in _LETTERS.items() if letter == sized[1]), int(sized[2]))
        return cls(text)

    def __str__(self) -> str:
        return f"{_LETTERS[self.name]}{self.size}" if self.size else self.name

    def refusal(self, target: str) -> str | None:
        """Explain why a target does not support this granularity and list those it does, or return None if it does."""
        if target not in _TARGETS[self.name]:
            able = ", ".join(name for name, targets in _TARGETS.items() if target in targets)
            return f"cannot be quantized per {self.name}; use {able}"
        if self.name == "column" and target == "pv":
            return f"has groups of {self.size} tokens of a channel; write g{self.size}" if self.size else None
        if self.name == "column" and not self.size:
            return "needs a number of tokens per scale, such as 4:c64"
        return None

    @property
    def spans_rows(self) -> bool:
        """Whether one scale covers all rows of a weight, or all queries of logits."""
        return self.name in _LEADING

    @property
    def shared_leading_axes(self) -> tuple[int, ...]:
        """Axes, besides the last, along which values share a scale.

        They are axes of logits [B, heads, queries, keys], or of queries, keys or values [B, heads, tokens, channels].
        """
        return _LEADING.get(self.name, ())

    @property
    def shares_scale_across_maps(self) -> bool:
        """Whether the two maps of differential attention share the scales of their logits."""
        return self.name in ("tensor", "pair")

    @property
    def is_per_pair(self) -> bool:
        """Whether the two maps of each head have one scale in common, which depends on both."""
        return self.name == "pair"

    @property
    def is_token_local(self) -> bool:
        """Whether no scale is computed at run time from several tokens. This includes calibrated scales."""
        return self.name in ("", "row", "group", "static")

    @property
    def has_token_groups(self) -> bool:
        """Whether scales are shared by groups of tokens counted from position 0, so that left padding changes them."""
        return self.name in ("column", "block", "warp", "thread")

    @property
    def is_static(self) -> bool:
        """Whether scales are calibrated in advance, so that none are computed or stored at run time."""
        return self.name == "static"

    @property
    def block_size(self) -> int:
        """Side length of a block for the granularity "block"; 0 for all others."""
        return self.size or 0 if self.name == "block" else 0

    @property
    def tokens_per_scale(self) -> int:
        """Number of cached tokens that share per-channel scales; 1 unless the granularity is "column" with a size."""
        return self.size or 1 if self.name == "column" else 1

    def view(self, x: "Tensor") -> "tuple[Tensor, Axes]":
        """Return a view of x [..., rows, columns], and the axes of the view along which all values share one scale.

        For blocks, a weight [rows, columns] becomes [⌈rows/size⌉, size, ⌈columns/size⌉, size], padded with zeros.

        Raises:
            UsageError: the granularity spans more than one tensor, or `size` does not divide the axis.
        """
        if self.name == "tensor":
            return x, tuple(range(x.dim()))
        if self.name == "block":
            return self._tiles(x), (-3, -1)
        axis = _AXES.get(self.name)
        if axis is None:
            raise UsageError(f"granularity {self.name!r} spans more than one tensor and cannot be applied to one")
        if self.size is None or not isinstance(axis, int):
            return x, axis
        length = x.shape[axis]
        if length % self.size:
            raise UsageError(f"{self.size} does not divide axis {axis} of a tensor of shape {list(x.shape)}")
        return x.unflatten(axis, (length // self.size, self.size)), axis

    def _tiles(self, x: "Tensor") -> "Tensor":
        from torch.nn.functional import pad

        rows, columns = (-length % self.block_size for length in x.shape)
        whole: Tensor = pad(x, (0, columns, 0, rows)) if rows or columns else x
        tiles: Tensor = whole.unflatten(1, (-1, self.block_size)).unflatten(0, (-1, self.block_size))
        return tiles

    def undo_view(self, view: "Tensor", shape: "tuple[int, ...]") -> "Tensor":
        """Invert `view`: return the tensor of the given shape; for blocks a weight [rows, columns] without padding."""
        if not self.block_size:
            return view.reshape(shape)
        rows, columns = shape
        return view.flatten(2, 3).flatten(0, 1)[:rows, :columns]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored scales of a weight [..., out, in]."""
        if self.block_size:
            return (*shape[:-2], *(-(-length // self.block_size) for length in shape[-2:]))
        return (1,) if self.spans_rows else (*shape[:-1], shape[-1] // self.size if self.size else 1)

    def reshape_scale(self, scale: "Tensor") -> "Tensor":
        """Reshape a weight's stored scales so that they broadcast to the view of the weight that `view` returns."""
        if self.block_size:
            return scale[:, None, :, None]
        return scale.unsqueeze(-1) if self.size else scale


UNSHARED = Granularity("")


def _why_not_rows(name: str, target: str) -> str:
    """Explain why "channel" or "token" does not fit a target, and what to write instead."""
    if name == "channel" and target in ("k", "v"):
        return (
            "a channel of the cache has a scale for each block of tokens; for keys write c32, a scale per channel over "
            "32 tokens, and for values token, a scale per token"
        )
    rows = {"weights": "channel", "": "row"}.get(target, "token")
    return f"{target or 'a scheme without a target'} has no scale per {name}; write {rows}"
