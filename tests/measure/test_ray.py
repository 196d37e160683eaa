"""The engine of a Ray cluster: on one of two processors here, whose machines are this one."""

import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.sweep.ray_cluster import run_on_ray
from diffquant.support.progress import report_nothing
from tests.support.ray_here import RayHere
from tests.support.sleepers import scores, sleeping_run
from tests.support.thorough import thorough


@pytest.fixture(scope="module")
def address():
    # Importing Ray takes seconds.
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", "")
        cluster = RayHere(2)
        yield cluster.address
        cluster.stop()


@thorough
def test_a_worker_that_is_killed_is_named_and_loses_only_its_cell(address, tmp_path, caplog):
    run_on_ray(sleeping_run(tmp_path, 4, 20, 0.1, deadly=["cell 7"]), report_nothing, address, 2)
    assert "died while it measured" in caplog.text
    assert len(scores(tmp_path)) == 19
    (lost,) = sleeping_run(tmp_path, 4, 20, 0.0).cells
    assert lost.task == "cell 7"
    assert lost.read_failure().startswith("Ray's worker")
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


@thorough
def test_a_machine_that_would_measure_other_cells_is_refused_before_the_first(address, tmp_path):
    run = sleeping_run(tmp_path, 1, 4, 0.0)
    for cell in run.cells:
        cell.key["code"] = "0123456789abcdef"
    with pytest.raises(UsageError, match=r"cannot take part: .* cannot measure the cells as planned, because code"):
        run_on_ray(run, report_nothing, address, 1)
    assert not list(tmp_path.iterdir())


@thorough
def test_a_folder_that_vanishes_is_named(address, tmp_path):
    def vanish(done, total, what):
        if done:
            with suppress(FileNotFoundError):
                (tmp_path / "cells").rename(tmp_path / "elsewhere")

    with pytest.raises(DiffQuantError, match=f"folder {tmp_path}/cells can no longer be read"):
        run_on_ray(sleeping_run(tmp_path / "cells", 2, 40, 0.1), vanish, address)


def test_an_address_without_a_cluster_is_refused(tmp_path, monkeypatch):
    def find_none(**options):
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=find_none))
    with pytest.raises(
        UsageError,
        match=r"no Ray cluster at auto: Could not find any running Ray instance\.; start one with `ray start",
    ):
        run_on_ray(sleeping_run(tmp_path, 1, 1, 0.0), report_nothing, "auto")
