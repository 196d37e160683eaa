"""Engines: whoever measures a sweep's cells, they are the same; what dies is replaced, and what is gone is named."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from diffquant.bench.programs.sleepers import Sleeper, scores, sleeping_work
from diffquant.errors import CheckpointError, DiffQuantError, MissingDependencyError, UsageError
from diffquant.support.progress import silent
from diffquant.sweep import SweepOptions, run_sweep
from diffquant.sweep.addresses import check_alike
from diffquant.sweep.claims import Claims, latest_claims
from diffquant.sweep.crew import Member, keep_at_work
from diffquant.sweep.engines import local, ray_cluster
from diffquant.sweep.engines.choice import chosen_engine
from diffquant.sweep.engines.local import run_processes
from diffquant.sweep.run import join_sweep
from diffquant.sweep.subject import CheckpointSubject
from diffquant.sweep.worker import Worker
from tests.support import tiny_lm

OF_PERPLEXITY = {"characters": 500, "window": 64, "stride": 32}
OPTIONS = SweepOptions(
    tasks=("hellaswag", "perplexity"),
    bits=(16, 4),
    targets=("logits", "weights"),
    granularities=("row",),
    task_options={"limit": 4} | OF_PERPLEXITY,
    dtype="float32",
)
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


def backwards(work, progress):
    """Works from the last batch on, in pieces that each travel as bytes."""
    for batch in reversed(work.batches):
        sent = pickle.loads(pickle.dumps(replace(work, batches=(batch,))))
        assert sent.jobs[0].subject.source is not batch[0].subject.source
        Worker(sent).run(progress)


def side_by_side(work, progress):
    """Two workers in threads, which share the work that they were made of and must share no model."""
    threads = [threading.Thread(target=Worker(work, place / 2).run) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stopping(cells):
    """An engine that stops as Ctrl-C does, after some cells."""

    def run(work, progress):
        def stop(done, total, what):
            if done == cells:
                raise KeyboardInterrupt

        Worker(work).run(stop)

    return run


def test_every_engine_gives_the_same_sweep(model, undisturbed, tmp_path):
    expected = lasting(undisturbed)
    engines = {"backwards": backwards, "side by side": side_by_side, "processes": partial(run_processes, workers=2)}
    for name, engine in engines.items():
        run_sweep([model], OPTIONS, tmp_path / name, engine=engine).require_complete()
        assert lasting(tmp_path / name) == expected
        assert not left_over(tmp_path / name)


def test_a_sweep_that_stops_under_one_engine_goes_on_under_another(model, undisturbed, tmp_path):
    with pytest.raises(KeyboardInterrupt, match=f"2 of {CELLS} cells are done"):
        run_sweep([model], OPTIONS, tmp_path, engine=stopping(2))
    with pytest.raises(KeyboardInterrupt, match=f"3 of {CELLS} cells are done"):
        run_sweep([model], OPTIONS, tmp_path, engine=stopping(1))
    assert join_sweep([model], OPTIONS, tmp_path) is not None
    assert lasting(tmp_path) == lasting(undisturbed)


def test_sweeps_into_one_folder_at_once_measure_each_cell_once_and_all_end_well(
    model, undisturbed, tmp_path, monkeypatch
):
    measure, measured = CheckpointSubject.measure, []

    def counted(self, task, recipe, *others):
        measured.append((task.name, recipe))
        return measure(self, task, recipe, *others)

    monkeypatch.setattr(CheckpointSubject, "measure", counted)
    ended = []

    def sweep():
        result = run_sweep([model], OPTIONS, tmp_path)
        result.require_complete()
        ended.append(result)

    threads = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 3
    assert len(measured) == CELLS
    assert lasting(tmp_path) == lasting(undisturbed)


def test_workers_on_a_folder_share_its_cells_and_the_last_one_writes_the_tables(
    model, undisturbed, tmp_path, monkeypatch
):
    measure, both_measure = CheckpointSubject.measure, threading.Barrier(2, timeout=60)
    first = set()

    def together(self, task, recipe, *others):
        if threading.get_ident() not in first:
            first.add(threading.get_ident())
            both_measure.wait()
        return measure(self, task, recipe, *others)

    monkeypatch.setattr(CheckpointSubject, "measure", together)
    ended = []
    threads = [threading.Thread(target=lambda: ended.append(join_sweep([model], OPTIONS, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 2
    assert any(ended)
    assert {"sweep.json", "table.csv", "report.html"} < {file.name for file in tmp_path.iterdir()}
    assert lasting(tmp_path) == lasting(undisturbed)
    assert not left_over(tmp_path)


def test_a_worker_leaves_cells_whose_holder_is_alive(model, tmp_path, monkeypatch):
    measure, held, ended = CheckpointSubject.measure, threading.Event(), threading.Event()

    def slow(self, task, recipe, *others):
        held.set()
        ended.wait(60)
        return measure(self, task, recipe, *others)

    options = replace(OPTIONS, tasks=("perplexity",), bits=(16,), task_options=OF_PERPLEXITY)
    monkeypatch.setattr(CheckpointSubject, "measure", slow)
    other = threading.Thread(target=run_sweep, args=([model], options, tmp_path))
    other.start()
    held.wait(60)
    assert join_sweep([model], options, tmp_path) is None
    assert not (tmp_path / "sweep.json").exists()
    ended.set()
    other.join()
    assert (tmp_path / "sweep.json").exists()


def test_a_worker_that_is_killed_is_replaced_and_its_cell_tried_again(tmp_path, caplog):
    killed = []

    def kill_the_first_holder(done, total, what):
        for claim in [] if killed else tmp_path.glob("*.claim"):
            if content := claim.read_text():
                killed.append(json.loads(content)["pid"])
                os.kill(killed[0], signal.SIGKILL)
                break

    run_processes(sleeping_work(tmp_path, 4, 60, 0.05), kill_the_first_holder, 2)
    assert f"the worker in process {killed[0]} died; another takes its place" in caplog.text
    assert len(scores(tmp_path)) == 60
    # It may have died after its cell was written: a sweep clears such claims when it writes its result.
    latest = latest_claims(file.name for file in tmp_path.iterdir())
    Claims(tmp_path).clear(latest, latest)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def test_a_cell_that_kills_its_worker_twice_is_reported_and_the_others_are_measured(tmp_path):
    work = sleeping_work(tmp_path, 2, 10, 0.0, deadly={"cell 3"})
    run_processes(work, silent, 2)
    assert sorted(scores(tmp_path)) == sorted(f"cell {number}" for number in range(10) if number != 3)
    (lost,) = [job for job in work.jobs if job.cell.read() is None]
    assert lost.cell.read_failure().startswith("the process that measured it died, 2 times")
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}
    # The next run tries it anew.
    Worker(sleeping_work(tmp_path, 2, 10, 0.0)).run()
    assert len(scores(tmp_path)) == 10


def test_workers_end_with_the_process_that_started_them(tmp_path):
    # Whoever is started in a shell's background ignores SIGINT, and so do those that it starts.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from diffquant.bench.programs.sleepers import sleeping_work; from diffquant.support.progress import silent\n"
        "from diffquant.sweep.engines.local import run_processes; from pathlib import Path\n"
        f"run_processes(sleeping_work(Path({str(tmp_path)!r}), 4, 1000, 0.05), silent, 2)\n"
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
        if count == len(scores(tmp_path)) and not list(tmp_path.glob("*.claim")):
            break
        count = len(scores(tmp_path))
        threading.Event().wait(1.0)
    assert not list(tmp_path.glob("*.claim"))
    assert count == len(scores(tmp_path)) < 1000


@pytest.mark.parametrize("workers", [1, 2])
def test_a_folder_that_vanishes_is_named(tmp_path, workers):
    # More than are measured between two looks, however busy the machine is.
    work = sleeping_work(tmp_path / "cells", 2, 500, 0.05)

    def vanish(done, total, what):
        if done:
            shutil.rmtree(tmp_path / "cells", ignore_errors=True)

    with pytest.raises(DiffQuantError, match=f"{tmp_path}/cells, where the sweep's cells lie, cannot be read any more"):
        run_processes(work, vanish, workers)


@pytest.mark.parametrize(
    ("ending", "said"),
    [("failed", "every worker failed"), ("died", "workers die before they measure anything")],
)
def test_workers_that_fail_or_die_at_once_end_the_sweep(tmp_path, ending, said):
    gone = Member("nowhere", lambda: ending, lambda: None)
    with pytest.raises(DiffQuantError, match=said):
        keep_at_work(sleeping_work(tmp_path, 1, 2, 0.0), 2, lambda place: gone, silent)


def test_the_third_death_in_a_row_without_a_claim_ends_the_sweep(tmp_path):
    starts = []

    def start(place):
        # The second of them has claimed a cell before it dies.
        if len(starts) == 1:
            (tmp_path / "cell 0.0.claim").touch()
        starts.append(place)
        return Member("nowhere", lambda: "died", lambda: None)

    with pytest.raises(DiffQuantError, match="workers die before they measure anything"):
        keep_at_work(sleeping_work(tmp_path, 1, 1, 0.0), 1, start, silent)
    assert len(starts) == 5


def test_more_workers_than_memory_holds_are_refused_before_a_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(Sleeper, "held_bytes", 4 * 10**9)
    monkeypatch.setattr(local, "free_memory", lambda: 9 * 10**9)
    monkeypatch.setattr(local, "keep_at_work", lambda *_: None)
    work, said = sleeping_work(tmp_path, 1, 2, 0.0), []
    with pytest.raises(UsageError, match=r"3 x 4\.00 GB of weights in 9\.00 GB of main memory that are free"):
        run_processes(work, silent, 3, say=said.append)
    run_processes(work, silent, 2, say=said.append)
    assert said == ["2 workers with 1 thread each; 2 x 4.00 GB of weights in 9.00 GB of main memory that are free"]


def test_options_that_exclude_each_other_are_refused():
    for options, values, said in (
        (SweepOptions(device="cpu"), (None, ("cpu",), None), "devices takes the place of device"),
        (SweepOptions(device_map="auto"), (2, (), None), "leave out workers"),
        (SweepOptions(), (None, ("cpu", "meta"), None), "not of one kind"),
        (SweepOptions(), (None, ("cpu",), "auto"), "ray gives each of its workers a GPU"),
        (SweepOptions(), (0, (), None), "must be 1 or more"),
    ):
        with pytest.raises(UsageError, match=said):
            chosen_engine(options, *values, silent)
    options, engine = chosen_engine(SweepOptions(), None, ("cpu", "cpu"), None, silent)
    assert (options.device, engine.keywords["workers"], engine.keywords["devices"]) == ("cpu", 2, ("cpu", "cpu"))
    alone, several = (chosen_engine(SweepOptions(), workers, (), None, silent)[1] for workers in (1, 3))
    assert (alone, several.keywords["workers"]) == (None, 3)


def test_without_ray_its_extra_is_named_and_without_asking_it_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'diffquant\[ray\]'"):
        chosen_engine(SweepOptions(), None, (), "auto", silent)
    code = "import sys, diffquant.sweep.run, diffquant.sweep.engines.choice; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_worker_needs_no_torch_until_it_measures():
    code = "import sys, diffquant.sweep.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_machine_that_would_measure_other_cells_is_refused(model, tmp_path, monkeypatch):
    def asking(work, progress):
        check_alike(work)
        monkeypatch.setattr("diffquant.sweep.addresses.code_digest", lambda roots, picking: "0123")
        with pytest.raises(CheckpointError, match="would measure other cells than were planned, since code differ"):
            check_alike(work)
        Worker(work).run(progress)

    run_sweep([model], replace(OPTIONS, bits=(16,)), tmp_path, engine=asking)


def test_what_a_ray_worker_failed_at_is_no_part_of_the_results(capsys):
    failed = type("RayTaskError", (Exception,), {})

    def get(reference):
        raise failed("no disk")

    ray = SimpleNamespace(
        wait=lambda references, timeout: (references, []), get=get, exceptions=SimpleNamespace(RayTaskError=failed)
    )
    assert ray_cluster._member(ray, object(), "Ray's task 1").end() == "failed"
    assert capsys.readouterr() == ("", "Ray's task 1: no disk\n")
