"""Every committed cell is read and written as it is."""

import pytest

from diffquant.measure.results import TaskResult
from research.pages.raw import folder, raw

SWEEPS = sorted(str(file.relative_to(folder())).removesuffix(".xz") for file in folder().rglob("sweep.json*"))


@pytest.mark.parametrize("name", SWEEPS)
def test_committed_cells_read_and_write_as_they_are(name):
    cells = raw(name)["cells"]
    assert cells
    for cell in cells:
        assert TaskResult.from_dict(cell["result"]).to_cell() == cell["result"]
