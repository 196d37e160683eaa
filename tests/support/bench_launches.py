"""Every group of `make gpu-bench` as a test that measures it once, for `tests.support.uncompiled` to count its kernels.

The last group, which generates text, is left out: it runs a thousand steps of a model, and its kernels are few.
"""

import pytest

from diffquant.bench.contest import linears
from diffquant.bench.gpu.groups import Group, generation_cells, groups


@pytest.mark.parametrize("group", [x for x in groups() if x.measure is not generation_cells], ids=lambda x: x.name)
def test_group(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    # One weight has the kernels of many.
    monkeypatch.setitem(linears._COLD_BYTES, "cuda", 1)
    assert group.measure(*group.arguments)
