"""Every committed cell is read and written as it is."""

import pytest

from diffquant.sweep.measurement import Measurement
from research.check.raw import committed, raw


@pytest.mark.parametrize("name", committed("sweep.json"))
def test_committed_cells_read_and_write_as_they_are(name):
    cells = raw(name)["cells"]
    assert cells
    for cell in cells:
        assert Measurement.from_dict(cell["result"]).to_dict() == cell["result"]
