"""Numbers in text, and whether one is a value as rounded as it is written."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

# A sign belongs to a number where it does not join it to another or to a name ("0.94-0.95", "SmolLM2-135M").
NUMBER = r"(?<![\w.])(?<![A-Za-z]-)(?<![A-Za-z]\d-)[+\-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+\-−]?\d+)?(?![\d])"


@dataclass(frozen=True)
class About:
    """A value that a page gives loosely ("3,000 times", "about half"): right within a share of it."""

    value: float
    share: float


@dataclass(frozen=True)
class Disputed:
    """A value that a page is known to give wrongly. Once it is right, the entry is the error."""

    value: float
    why: str


Expected = float | int | About | Disputed


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest of some values."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def numbers_in(text: str) -> list[str]:
    return re.findall(NUMBER, text)


def fault(written: str, expected: Expected) -> str | None:
    """Why a number as written does not give a value; None if it does."""
    if isinstance(expected, Disputed):
        if _gives(written, expected.value):
            return f"it is right now; take the dispute ({expected.why}) out of the declaration"
        return None
    if isinstance(expected, About):
        is_near = math.isclose(float(_plain(written)), expected.value, rel_tol=expected.share)
        return None if is_near else f"the raw file has {expected.value:.6g}, more than {expected.share:.0%} away"
    return None if _gives(written, expected) else f"the raw file has {expected:.6g}"


def faults(written: Sequence[str], expected: Sequence[Expected]) -> str | None:
    """The same for several numbers at once."""
    if len(written) != len(expected):
        return f"{len(written)} numbers stand there and {len(expected)} are declared"
    wrong = [f"{text}: {why}" for text, value in zip(written, expected, strict=True) if (why := fault(text, value))]
    return "; ".join(wrong) or None


def _gives(written: str, value: float) -> bool:
    """Whether a value, rounded to the last digit that is written, is what is written."""
    number = Decimal(_plain(written))
    last_digit = Decimal(1).scaleb(int(number.as_tuple().exponent))
    # Both neighbours of a half are accepted, and a float's own error.
    return abs(Decimal(value) - number) <= last_digit / 2 + abs(Decimal(value)) * Decimal("1e-12")


def _plain(written: str) -> str:
    return written.replace(",", "").replace("−", "-")
