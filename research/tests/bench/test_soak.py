"""Serving for a while: memory that does not grow, and what is refused. `make soak` serves for an hour."""

import os

import pytest

from diffquant.errors import ToleranceError
from diffquant.onnx import ExportOptions, export
from research.bench.programs import soak
from tests.support import tiny_lm
from tests.support.thorough import thorough

pytestmark = thorough
SECONDS = float(os.environ.get("DIFFQUANT_SOAK_SECONDS", "20"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("soak")
    export(tiny_lm.write_diff_v2(root / "model"), root / "out", ExportOptions.parse("8:row"))
    return root / "out"


def test_memory_does_not_grow_while_it_serves(folder):
    served = soak.serve([folder], SECONDS, SECONDS / 4)
    print(soak.summary(served))
    served.check()
    assert len(served.samples) == 5
    assert served.tokens > 0


def test_a_server_that_grows_or_changes_its_mind_is_refused():
    samples = tuple(soak.Sample(float(n), n, 10**8 + n * 5 * 10**6, 10**7) for n in range(3))
    with pytest.raises(ToleranceError, match=r"grown by 10.0 MB, which is over 8 MB, in 2 rounds"):
        soak.Soak(samples, 9, is_constant=True).check()
    soak.Soak(samples[:2], 9, is_constant=True).check()
    with pytest.raises(ToleranceError, match="not those of the first one"):
        soak.Soak(samples[:1], 9, is_constant=False).check()
