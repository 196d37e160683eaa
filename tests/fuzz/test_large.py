"""A small run of what `python -m tests.fuzz.large` does with checkpoints larger than memory."""

import sys

from tests.fuzz import large
from tests.support.thorough import thorough


@thorough
def test_memory_does_not_grow_with_the_tensors(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["large", "--tensor-gigabytes", "0.3", "--scheme", "4:tensor"])
    monkeypatch.setattr(large, "LIMIT", 500_000_000)
    assert large.main() == 0
    assert "in tensors of 0.3 GB, 4:tensor: " in capsys.readouterr().out
