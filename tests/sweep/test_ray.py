"""The engine of a Ray cluster: on one of two processors here, whose machines are this one."""

import json
import os
import shutil
import signal

import pytest

from diffquant.bench.programs.ray_here import RayHere
from diffquant.bench.programs.sleepers import scores, sleeping_work
from diffquant.errors import DiffQuantError, UsageError
from diffquant.support.progress import silent
from diffquant.sweep.engines.ray_cluster import run_on_ray

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def address():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", "")
        cluster = RayHere(2)
        yield cluster.address
        cluster.stop()


def test_a_worker_that_is_killed_in_the_middle_is_replaced_and_the_sweep_ends_whole(address, tmp_path, caplog):
    killed = []

    def kill_the_first_holder(done, total, what):
        for claim in [] if killed or done < 5 else tmp_path.glob("*.claim"):
            if content := claim.read_text():
                killed.append(json.loads(content)["pid"])
                os.kill(killed[0], signal.SIGKILL)
                break

    run_on_ray(sleeping_work(tmp_path, 4, 60, 0.1), kill_the_first_holder, address, 2)
    assert killed
    assert "died; another takes its place" in caplog.text
    assert len(scores(tmp_path)) == 60
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def test_a_machine_that_would_measure_other_cells_is_refused_before_the_first(address, tmp_path):
    work = sleeping_work(tmp_path, 1, 4, 0.0)
    for job in work.jobs:
        job.cell.key["code"] = "0123456789abcdef"
    with pytest.raises(
        UsageError, match=r"cannot take part: .* would measure other cells than were planned, since code"
    ):
        run_on_ray(work, silent, address, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanishes_is_named(address, tmp_path):
    def vanish(done, total, what):
        if done:
            shutil.rmtree(tmp_path / "cells", ignore_errors=True)

    with pytest.raises(DiffQuantError, match=f"{tmp_path}/cells, where the sweep's cells lie, cannot be read any more"):
        run_on_ray(sleeping_work(tmp_path / "cells", 2, 40, 0.1), vanish, address)


def test_an_address_without_a_cluster_is_refused(tmp_path, monkeypatch):
    def find_none(**options):
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr("ray.init", find_none)
    with pytest.raises(
        UsageError,
        match=r"no Ray cluster at auto: Could not find any running Ray instance\.; start one with `ray start",
    ):
        run_on_ray(sleeping_work(tmp_path, 1, 1, 0.0), silent, "auto")
