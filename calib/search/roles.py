"""The price of each kind of tensor: the KL of rounding it alone, over the bits that rounding saves.

Where parts were measured, queries (and keys, where each map has its own) are told apart by map, experts by layer, and λ
and gates are among the kinds, which stay at 16 bits unless an override names them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diffquant.calib.search.result import Measurement, SearchResult
from diffquant.calib.search.widths import Width, code_width, spoken

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
    kl: dict[Width, float]
    worst: int

    def per_megabit(self, width: Width) -> float:
        """Nats for each million bits that a width saves of 16, its scales left out."""
        saved = _UNROUNDED - code_width(width)
        return self.kl[width] / (self.elements * saved / 1e6)


def roles(result: SearchResult) -> list[Role]:
    """The kinds of tensors of a search and of parts, the one that pays most for a bit at the lowest width first."""
    kinds: dict[tuple[str, str], list[Measurement]] = {}
    for unit in [*result.measurements, *(result.parts or [])]:
        kinds.setdefault((unit.target, unit.kind), []).append(unit)
        if result.parts is not None and ".experts." in unit.kind:
            kinds[unit.target, f"{unit.kind}, layer {unit.layer}"] = [unit]
    found = [_role(target, kind, units) for (target, kind), units in kinds.items()]
    return sorted(found, key=lambda role: -role.per_megabit(result.widths[-1]))


def roles_table(result: SearchResult) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of a table of roles, whose first two columns are names."""
    heads = ["kind", "target", *(f"KL per Mbit at {spoken(width)}" for width in result.widths), "worst layer"]
    lines = [
        [role.kind, role.target, *(f"{role.per_megabit(width):.3g}" for width in result.widths), str(role.worst)]
        for role in roles(result)
    ]
    return heads, lines


def _role(target: str, kind: str, units: Sequence[Measurement]) -> Role:
    widths = units[0].kl
    lowest = list(widths)[-1]
    worst = max(units, key=lambda unit: unit.kl[lowest])
    kl = {bits: sum(unit.kl[bits] for unit in units) for bits in widths}
    return Role(target, kind, len(units), sum(unit.elements for unit in units), kl, worst.layer)
