"""The interface of a rounding: the rule, and the rule made ready for one checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.recipe.rounding import RoundingSettings
from diffquant.scheme import Scheme
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource
from diffquant.support.progress import Progress

# (source name, values [rows, in], scheme, dtype of the stored scale) -> codes int8 [rows, in], scale as stored.
Round = Callable[[str, Tensor, Scheme, torch.dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rounder:
    """A rounding made ready for one checkpoint.

    Attributes:
        round: function of any rows of one of the checkpoint's weights, in float32, whose scales do not span rows;
            called from several threads.
        identity: plain data on which its result depends beside the checkpoint, the scheme and the rounding's name.
        made: codes int8 [out, in] and stored scale of whole weights, by name, where a rule rounds them while it is made
            ready; `round` serves the others.
    """

    round: Round
    identity: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Rounding(ABC):
    """A rule by which weights become codes and stored scales; whatever the rule, the format is the same.

    Attributes:
        name: name that recipes and `--rounding` give it.
        needs_text: whether it reads a text, which the recipe's settings then name.
        options: names of the settings beside the text that it takes.
        row_by_row: whether it works on rows alone, so that no scale can span rows. A rule that does not leaves a scale
            of the whole tensor to absmax, with every weight at its nearest code.
        work: products with every weight, for each token, that a rule with a text takes as long as.
    """

    name: ClassVar[str]
    needs_text: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset()
    row_by_row: ClassVar[bool] = True
    work: ClassVar[float] = 0.0

    @abstractmethod
    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,
    ) -> Rounder:
        """Make the rule ready for a checkpoint, once before the first of its weights.

        Args:
            source: a 16-bit checkpoint; for a rule with `needs_text` one that runs.
            schemes: scheme of each module whose weight is quantized, by the checkpoint's own names.
            settings: options, and text, tokens and window that a rule with `needs_text` reads; unset for any other.
            progress: called while a text is read.

        Raises:
            DiffQuantError: the checkpoint or the text cannot be read.
        """


ROUNDINGS: dict[str, Rounding] = {}


def register(rounding: Rounding) -> None:
    """Let recipes name a rounding.

    Raises:
        UsageError: another one has its name.
    """
    if rounding.name in ROUNDINGS:
        raise UsageError(f"there is a rounding {rounding.name!r} already; give the new one another name")
    ROUNDINGS[rounding.name] = rounding
