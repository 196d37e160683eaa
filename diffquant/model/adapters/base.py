"""What an adapter is, and the check that several share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.model.architecture import Architecture
from diffquant.model.layout import Shape, linear_shapes, parameter_shapes

if TYPE_CHECKING:
    from diffquant.model.config import DiffTransformerConfig


@dataclass(frozen=True)
class Adapter:
    """A source format's view of one model.

    Attributes:
        architecture: the model as DiffTransformer runs it, as plain data.
        renames: parts of a canonical name that the source spells otherwise, canonical to source.
        repeated_rows: output heads per source head, by canonical name ending, for weights whose rows
            are repeated on load: (width of a head, source heads, canonical heads).
    """

    architecture: Architecture
    renames: Mapping[str, str] = field(default_factory=dict)
    repeated_rows: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

    @cached_property
    def config(self) -> "DiffTransformerConfig":
        """What a DiffTransformer is built from; only here transformers is imported."""
        from diffquant.model.config import DiffTransformerConfig

        return DiffTransformerConfig.of(self.architecture)

    def source_name(self, canonical: str) -> str:
        """The checkpoint's name for a DiffTransformer parameter."""
        for ours, theirs in self.renames.items():
            canonical = canonical.replace(ours, theirs)
        return canonical

    def source_shapes(self) -> dict[str, Shape]:
        """Every tensor the checkpoint must hold, by its own name."""
        return self._as_stored(parameter_shapes(self.architecture))

    def source_linears(self) -> dict[str, Shape]:
        """The linear layers' weights [out, in], by the checkpoint's own names."""
        return self._as_stored(linear_shapes(self.architecture))

    def row_order(self, canonical: str) -> Tensor | None:
        """Source row of each row of a DiffTransformer parameter; None where they are the same."""
        repeat = self._repeat(canonical)
        if repeat is None:
            return None
        width, source_heads, heads = repeat
        head = torch.arange(heads) // (heads // source_heads)
        return (head[:, None] * width + torch.arange(width)).flatten()

    def _repeat(self, canonical: str) -> tuple[int, int, int] | None:
        return next((r for part, r in self.repeated_rows.items() if part in canonical), None)

    def _as_stored(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {self.source_name(name): self._source_shape(name, shape) for name, shape in shapes.items()}

    def _source_shape(self, canonical: str, shape: Shape) -> Shape:
        repeat = self._repeat(canonical)
        return shape if repeat is None else (repeat[0] * repeat[1], *shape[1:])


def paired(heads: int, what: str) -> int:
    """Half of an even number of heads.

    Raises:
        CheckpointError: the number is odd.
    """
    if heads % 2:
        raise CheckpointError(f"{what} is {heads}: differential attention pairs its heads and needs an even number")
    return heads // 2
