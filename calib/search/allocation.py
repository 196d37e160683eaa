"""Allocation of bit widths under a budget: a width per unit with the least total cost, by integer programming."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from diffquant.calib.search.result import Width, count_code_bits, format_width
from diffquant.calib.search.units import Unit
from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.reports.tables import stored_bits_per_weight
from diffquant.support.installation import install_command
from diffquant.support.names import option_name

# Costs: cost by unit and width. Allocation: chosen width by unit.
Costs = Mapping[Unit, Mapping[Width, float]]
Allocation = dict[Unit, Width]
# Costs are scaled to this maximum, since the solver treats costs as equal that differ by less than 1e-6.
_LARGEST_COST = 1e6


@dataclass(frozen=True)
class Budget:
    """A size limit: the mean stored bits per element of each target, or the total bytes of all packed weights.

    Exactly one of the two is set.

    Attributes:
        bits: largest mean stored bits per element of each target, scales included.
        nbytes: largest size of all packed weights in bytes, scales included.
    """

    bits: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parse a budget: "4.5" is the mean stored bits per element, "90MB" the total bytes.

        Raises:
            UsageError: the text is neither.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kB|MB|GB)?", text.strip(), re.IGNORECASE)
        if not match:
            raise UsageError(f"cannot read budget {text!r}: expected average bits, such as 4.5, or bytes, such as 90MB")
        number = float(match[1])
        if match[2] is None:
            return cls(bits=number)
        return cls(nbytes=int(number * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2][0].lower()]))

    def __str__(self) -> str:
        return f"{self.bits:g} bits" if self.bits is not None else f"{(self.nbytes or 0) / 1e6:g} MB"

    def list_limits(self, units: Sequence[Unit]) -> list[tuple[list[Unit], float]]:
        """Return groups of units, each with its limit in bytes: one per target, or all units together for `nbytes`."""
        if self.nbytes is not None:
            return [(list(units), float(self.nbytes))]
        groups: dict[str, list[Unit]] = {}
        for unit in units:
            groups.setdefault(unit.target, []).append(unit)
        return [(group, (self.bits or 0.0) / 8 * sum(u.elements for u in group)) for group in groups.values()]

    def check(self, units: Sequence[Unit], widths: Sequence[Width]) -> None:
        """Check that the budget allows the narrowest width everywhere, and not the widest everywhere.

        Raises:
            UsageError: the budget is too small or too large, or it is in bytes and some units are not weights.
        """
        if self.nbytes is not None and any(unit.target != "weights" for unit in units):
            raise UsageError("a budget in bytes is for weights; give average bits for k, v and logits")
        for group, limit in self.list_limits(units):
            narrowest, *_, widest = sort_widths(group, widths)
            least = total_bytes(group, narrowest)
            if least > limit * (1 + 1e-9):
                elements = sum(unit.elements for unit in group)
                # Rounded up, so that a budget with the reported number is sufficient.
                each = math.ceil(100 * stored_bits_per_weight(least, elements)) / 100
                needed = f"{least / 1e6:.1f} MB" if self.nbytes is not None else f"{each:.2f} stored bits each"
                raise UsageError(
                    f"the budget of {self} is below the narrowest width: {group[0].target} at "
                    f"{format_width(narrowest)} take {needed}, scales included; raise {option_name('budget')}, or add "
                    f"a narrower width to {option_name('bits')}"
                )
        if all(total_bytes(group, sort_widths(group, widths)[-1]) < limit for group, limit in self.list_limits(units)):
            raise UsageError(
                f"the budget of {self} allows everything at {format_width(widest)}, the widest width; there is nothing "
                "to search"
            )


def total_bytes(units: Sequence[Unit], width: Width) -> float:
    """Return the stored bytes of all units together if each has this width."""
    return sum(unit.stored[width] for unit in units)


def sort_widths(units: Sequence[Unit], widths: Sequence[Width]) -> list[Width]:
    """Sort widths by the total bytes of the units, the smallest first."""
    return sorted(widths, key=lambda width: (total_bytes(units, width), count_code_bits(width)))


def require_scipy() -> None:
    """Check that scipy is installed, which the search needs.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"the search needs scipy for integer programming: {install_command('search')}"
        ) from error


def allocate(costs: Costs, budget: Budget) -> Allocation:
    """Choose the width of each unit so that the total cost is least within the budget.

    Args:
        costs: cost of every unit at every width, 0 or more; all units have the same widths.
        budget: size limit.

    Raises:
        DiffQuantError: the solver found no solution.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    units, widths = list(costs), list(next(iter(costs.values())))
    objective = np.array([costs[unit][bits] for unit in units for bits in widths])
    one_each = np.kron(np.eye(len(units)), np.ones(len(widths)))
    limits = budget.list_limits(units)
    sizes = np.zeros((len(limits), objective.size))
    for row, (group, _) in enumerate(limits):
        members = set(group)
        sizes[row] = [unit.stored[bits] * (unit in members) for unit in units for bits in widths]
    # Costs and sizes differ by orders of magnitude and the solver's tolerances are absolute, so both are scaled.
    solution = milp(
        _LARGEST_COST * objective / max(objective.max(), 1e-300),
        integrality=np.ones(objective.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(sizes / np.array([[limit] for _, limit in limits]), ub=1 + 1e-12),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": 60},
    )
    if solution.x is None:
        raise DiffQuantError(f"no widths within the budget were found: {solution.message}; try a larger budget")
    picked = solution.x.reshape(len(units), len(widths)).argmax(1)
    return {unit: widths[index] for unit, index in zip(units, picked, strict=True)}


def spread_evenly(units: Sequence[Unit], widths: Sequence[Width], budget: Budget) -> Allocation:
    """Choose widths by size alone, for comparison with `allocate`.

    The units alternate between the widest width that the budget allows for all of them and the next wider one, in the
    ratio that uses up the budget.
    """
    chosen: Allocation = {}
    for group, limit in budget.list_limits(units):
        totals = {width: total_bytes(group, width) for width in sort_widths(group, widths)}
        low = [width for width, stored in totals.items() if stored <= limit * (1 + 1e-9)][-1]
        high = next((width for width, stored in totals.items() if stored > totals[low]), low)
        share = (limit - totals[low]) / max(totals[high] - totals[low], 1e-9)
        allowed = spent = 0.0
        for unit in group:
            more = unit.stored[high] - unit.stored[low]
            allowed += share * more
            widen = high != low and spent + more <= allowed * (1 + 1e-9)
            spent += more if widen else 0.0
            chosen[unit] = high if widen else low
    return chosen


def average_bits(allocation: Mapping[Unit, Width], target: str) -> float:
    """Return the mean stored bits per element over the units of a target, such as "weights" or "k"."""
    units = [unit for unit in allocation if unit.target == target]
    return stored_bits_per_weight(
        sum(unit.stored[allocation[unit]] for unit in units), sum(unit.elements for unit in units)
    )
