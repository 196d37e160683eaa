"""Engines: whoever measures a sweep's cells, they are the same; what dies is replaced, and what is gone is named."""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from diffquant.errors import CheckpointError, DiffQuantError, MissingDependencyError, UsageError
from diffquant.measure.sweep import workers as workers_
from diffquant.measure.sweep.cell import Worker, check_same_environment, measure_all, remove_locks
from diffquant.measure.sweep.engines import choose_engine
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.sweep.subject import CheckpointSubject
from diffquant.measure.sweep.workers import distribute_cells, run_processes
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.sleepers import Sleeper, scores, sleeping_run
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

OF_PERPLEXITY = {"characters": 500, "window": 64, "stride": 32}
GRID = {"bits": (16, 4), "targets": ("logits", "weights"), "granularities": ("row",), "dtype": "float32"}
OPTIONS = SweepOptions(tasks=("hellaswag", "perplexity"), task_options={"limit": 4} | OF_PERPLEXITY, **GRID)
CELLS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "diff-v2")


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    run_sweep([model], OPTIONS, folder)
    return folder


def lasting(folder):
    """A folder's sweep.json without dates and seconds, as text."""
    sweep = json.loads((folder / "sweep.json").read_text())
    sweep["settings"]["date"] = ""
    for cell in sweep["cells"]:
        cell["result"]["seconds"] = 0
    return json.dumps(sweep, indent=1)


def left_over(folder):
    return [file.name for file in (folder / "cells").iterdir() if file.suffix != ".json"]


def backwards(run, progress):
    """Works from the last cell on, in pieces that each travel as bytes."""
    for cell in reversed(run.cells):
        sent = pickle.loads(pickle.dumps(replace(run, cells=[cell])))
        assert sent.subject_of(cell).source is not run.subject_of(cell).source
        measure_all(sent, progress)


def side_by_side(run, progress):
    """Two workers in threads, which are given the same cells and must share no model."""
    threads = [threading.Thread(target=measure_all, args=(run,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_engine_gives_the_same_sweep(model, undisturbed, tmp_path):
    expected = lasting(undisturbed)
    engines = {"backwards": backwards, "side by side": side_by_side, "processes": partial(run_processes, workers=2)}
    for name, engine in engines.items():
        run_sweep([model], OPTIONS, tmp_path / name, engine=engine).require_complete()
        assert lasting(tmp_path / name) == expected
        assert not left_over(tmp_path / name)


@in_one_test("count", [1, 2, 4, 7])
def test_shards_have_each_cell_once_and_the_sweep_after_them_measures_nothing(
    model, undisturbed, tmp_path, count, monkeypatch
):
    for number in range(1, count + 1):
        result = run_sweep([model], OPTIONS, tmp_path, engine=copied_from(undisturbed), shard=f"{number}/{count}")
        assert {cell.result is not None for cell in result.cells} <= {True}
        assert number * CELLS // count == len(list((tmp_path / "cells").iterdir()))
        assert not (tmp_path / "sweep.json").exists()
    monkeypatch.setattr(CheckpointSubject, "measure", None)
    run_sweep([model], OPTIONS, tmp_path).require_complete()
    assert lasting(tmp_path) == lasting(undisturbed)


def copied_from(folder):
    """An engine that takes cells from a folder that has them."""

    def engine(run, progress):
        for cell in run.cells:
            cell.write(replace(cell, folder=folder / "cells").read())

    return engine


def test_a_shard_loads_as_few_sets_of_weights_as_can_be(model, tmp_path):
    seen = []
    for number in (1, 2, 3):
        engine = lambda run, progress: seen.append({cell.weights_key for cell in run.cells})  # noqa: E731
        with pytest.raises(DiffQuantError, match="is gone"):
            run_sweep([model], OPTIONS, tmp_path, engine=engine, shard=f"{number}/3")
    assert [len(weights) for weights in seen] == [1, 1, 1]


@in_one_test("shard", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", "²/3", "1/" + "9" * 5000])
def test_a_shard_that_is_none_is_refused_before_a_model_is_opened(tmp_path, shard):
    with pytest.raises(UsageError, match="I/N with I from 1 to N"):
        run_sweep([tmp_path / "absent"], OPTIONS, tmp_path / "out", shard=shard)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", sampled([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], 3))
def test_a_worker_that_is_killed_is_named_and_loses_only_its_cell(tmp_path, caplog, number):
    killed = []

    def kill_one(done, total, what):
        if done >= 3 and not killed:
            killed.append(children()[0])
            os.kill(killed[0], number)

    # Long cells: one is sure to be under way.
    run_processes(sleeping_run(tmp_path, 4, 20, 0.5), kill_one, 2)
    said = f"the worker in process {killed[0]} was ended by {number.name}"
    assert said in caplog.text
    assert "another worker replaces it" in caplog.text
    assert len(scores(tmp_path)) == 19
    lost = sleeping_run(tmp_path, 4, 20, 0.0)
    assert lost.cells[0].read_failure().startswith(said)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}
    # The next run tries it anew.
    measure_all(lost)
    assert len(scores(tmp_path)) == 20
    assert len(list(tmp_path.iterdir())) == 20


def children():
    """Numbers of the processes that run workers of this one."""
    return [process.pid for process in multiprocessing.active_children()]


def test_cells_that_kill_their_workers_are_reported_and_the_others_are_measured(tmp_path):
    deadly = {"cell 3", "cell 4", "cell 9"}
    run = sleeping_run(tmp_path, 2, 10, 0.0, deadly=deadly)
    run_processes(run, report_nothing, 2)
    assert scores(tmp_path).keys() == {f"cell {number}" for number in range(10)} - deadly
    lost = [cell for cell in run.cells if cell.read() is None]
    assert {cell.task for cell in lost} == deadly
    assert all("was ended by SIGKILL, as when memory runs out" in cell.read_failure() for cell in lost)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def test_an_interrupt_ends_all_workers_at_once_and_leaves_whole_cells(tmp_path):
    def interrupt(done, total, what):
        if done >= 2:
            raise KeyboardInterrupt

    run = sleeping_run(tmp_path, 2, 100, 0.3)
    with pytest.raises(KeyboardInterrupt):
        run_processes(run, interrupt, 2)
    assert not children()
    done = len(scores(tmp_path))
    assert 2 <= done < 10
    remove_locks(run.cells)
    assert len(list(tmp_path.iterdir())) == done


@thorough
def test_workers_end_with_the_process_that_started_them(tmp_path):
    # Whoever is started in a shell's background ignores SIGINT, and so do those that it starts.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from tests.support.sleepers import sleeping_run; from diffquant.support.progress import report_nothing\n"
        "from diffquant.measure.sweep.workers import run_processes; from pathlib import Path\n"
        f"run_processes(sleeping_run(Path({str(tmp_path)!r}), 4, 1000, 0.05), report_nothing, 2)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    while len(scores(tmp_path)) < 4:
        assert driver.poll() is None
        threading.Event().wait(0.05)
    driver.kill()
    driver.wait()
    # Those that go on would make a new cell in much less than a second; those that end take the time they need.
    count = -1
    for _ in range(120):
        if count == len(scores(tmp_path)):
            break
        count = len(scores(tmp_path))
        threading.Event().wait(1.0)
    assert count == len(scores(tmp_path)) < 1000


@pytest.mark.parametrize("workers", sampled([1, 2], 2))
def test_a_folder_that_vanishes_is_named(tmp_path, workers):
    # More than are measured between two looks, however busy the machine is.
    run = sleeping_run(tmp_path / "cells", 2, 500, 0.05)

    def vanish(done, total, what):
        if done:
            with suppress(FileNotFoundError):
                (tmp_path / "cells").rename(tmp_path / "elsewhere")

    with pytest.raises(DiffQuantError, match=f"folder {tmp_path}/cells can no longer be read"):
        run_processes(run, vanish, workers)


def test_workers_that_die_at_once_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(workers_, "_begin", os.abort)
    with pytest.raises(DiffQuantError, match="workers die before they measure anything"):
        run_processes(sleeping_run(tmp_path, 1, 4, 0.0), report_nothing, 2)
    assert not list(tmp_path.iterdir())


class Here:
    """A worker in this process, which may die between two cells."""

    def __init__(self, run, seen, dies=False):
        self.worker, self.seen, self.dies = Worker(run), seen, dies

    def measure(self, number, is_patient):
        if self.dies:
            raise BrokenExecutor
        self.seen.append((self, self.worker.run.cells[number].weights_key[0].name))
        future = Future()
        future.set_result(self.worker.measure(number, is_patient))
        return future

    def result(self, future):
        return future.result()

    def stop(self):
        pass


def test_each_worker_keeps_to_the_weights_that_it_holds_as_long_as_there_are_cells_of_them(tmp_path):
    run, seen = sleeping_run(tmp_path, 4, 16, 0.0), []
    distribute_cells(run, 2, lambda place: Here(run, seen), report_nothing)
    assert len(scores(tmp_path)) == 16
    for worker in {worker for worker, _ in seen}:
        names = [name for each, name in seen if each is worker]
        assert len(list(itertools.groupby(names))) == len(set(names)) == 2


def test_a_worker_that_dies_between_two_cells_loses_none(tmp_path):
    run, started = sleeping_run(tmp_path, 1, 6, 0.0), []

    def start(place):
        started.append(place)
        return Here(run, [], dies=len(started) < 4)

    distribute_cells(run, 1, start, report_nothing)
    assert len(scores(tmp_path)) == 6
    assert len(started) == 4


def test_an_error_of_the_disk_ends_the_sweep(tmp_path, monkeypatch):
    def full(self, measurement):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("diffquant.measure.cells.Cell.write", full)
    run = sleeping_run(tmp_path, 1, 2, 0.0)
    with pytest.raises(OSError, match="no space"):
        distribute_cells(run, 1, lambda place: Here(run, []), report_nothing)


def test_more_workers_than_memory_holds_are_refused_before_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(Sleeper, "peak_weight_bytes", 4 * 10**9)
    monkeypatch.setattr(workers_, "available_memory", lambda: 9 * 10**9)
    monkeypatch.setattr(workers_, "distribute_cells", lambda *_: None)
    run, said = sleeping_run(tmp_path, 1, 2, 0.0), []
    with pytest.raises(UsageError, match=r"3 x 4\.00 GB of weights, 9\.00 GB of main memory free"):
        run_processes(run, report_nothing, 3, say=said.append)
    run_processes(run, report_nothing, 2, say=said.append)
    assert said == ["2 workers with 1 thread each; 2 x 4.00 GB of weights, 9.00 GB of main memory free"]


def test_options_that_exclude_each_other_are_refused():
    for options, values, said in (
        (SweepOptions(device_map="auto"), (2, (), None), "leave out workers"),
        (SweepOptions(), (None, ("cpu", "meta"), None), "are of different kinds"),
        (SweepOptions(), (None, ("cpu", "cpu"), "auto"), "ray uses GPUs of the cluster"),
        (SweepOptions(), (0, (), None), "must be 1 or more"),
    ):
        with pytest.raises(UsageError, match=said):
            choose_engine(options, *values, report_nothing)
    options, engine = choose_engine(SweepOptions(), None, ("cpu", "cpu"), None, report_nothing)
    assert (options.device, engine.keywords["workers"], engine.keywords["devices"]) == ("cpu", 2, ("cpu", "cpu"))
    alone, several = (choose_engine(SweepOptions(), workers, (), None, report_nothing)[1] for workers in (1, 3))
    assert choose_engine(SweepOptions(), None, ("cpu",), None, report_nothing)[0].device == "cpu"
    assert (alone.keywords["workers"], several.keywords["workers"]) == (1, 3)


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'diffquant\[ray\]'"):
        choose_engine(SweepOptions(), None, (), "auto", report_nothing)


def test_a_machine_that_would_measure_other_cells_is_refused(model, tmp_path, monkeypatch):
    def asking(run, progress):
        check_same_environment(run)
        monkeypatch.setattr("diffquant.measure.sweep.cell.result_version_digest", lambda modules: "0123")
        with pytest.raises(CheckpointError, match="cannot measure the cells as planned, because code differ"):
            check_same_environment(run)
        measure_all(run, progress)

    run_sweep([model], replace(OPTIONS, bits=(16,)), tmp_path, engine=asking)
