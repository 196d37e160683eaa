"""Comparisons bit by bit with what other libraries compute, counted: `python -m tests.oracles` prints the counts."""

from collections import Counter
from typing import Any

import torch

# Numbers that agreed, by the library and what was compared.
AGREED: Counter[tuple[str, str]] = Counter()


def agrees(oracle: str, what: str, ours: Any, theirs: Any) -> None:
    """Assert that two tensors or arrays are equal in every number, shape and dtype, and count their numbers."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} of {ours.numel()} differ"
    AGREED[oracle, what] += ours.numel()
