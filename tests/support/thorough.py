"""What `make test` leaves to `make test-thorough`: tests that take long, and cases for which a few others stand."""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def sampled(cases: Iterable[Any], each: int) -> list[Any]:
    """Cases for `parametrize`, of which `make test` runs the first, and one in `each` from there on."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough if number % each else ())
        for number, case in enumerate(cases)
    ]
