"""What each kind of tensor pays for its bits: the KL of rounding it alone, over the bits that rounding saves."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffquant.calib.search.result import Measurement, SearchResult

_UNROUNDED = 16


@dataclass(frozen=True)
class Role:
    """All units of one target and kind, over the layers.

    Attributes:
        target, kind: as `Measurement` has them.
        units: number of them.
        elements: entries of all of them.
        kl: sum of their costs at each width, in nats, each rounded alone.
        worst: layer of the one that costs most at the lowest width.
    """

    target: str
    kind: str
    units: int
    elements: int
    kl: dict[int, float]
    worst: int

    def per_megabit(self, bits: int) -> float:
        """Nats for each million bits that a width saves of 16, its scales left out."""
        return self.kl[bits] / (self.elements * (_UNROUNDED - bits) / 1e6)


def roles(result: SearchResult) -> list[Role]:
    """The kinds of tensors of a search, the one that pays most for a bit at the lowest width first."""
    kinds: dict[tuple[str, str], list[Measurement]] = {}
    for unit in result.measurements:
        kinds.setdefault((unit.target, unit.kind), []).append(unit)
    found = [_role(target, kind, units) for (target, kind), units in kinds.items()]
    return sorted(found, key=lambda role: -role.per_megabit(min(role.kl)))


def _role(target: str, kind: str, units: Sequence[Measurement]) -> Role:
    widths = units[0].kl
    lowest = min(widths)
    worst = max(units, key=lambda unit: unit.kl[lowest])
    kl = {bits: sum(unit.kl[bits] for unit in units) for bits in widths}
    return Role(target, kind, len(units), sum(unit.elements for unit in units), kl, worst.layer)
