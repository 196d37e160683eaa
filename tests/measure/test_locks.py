"""Locks: one process of any number measures a cell, and one that is gone holds nothing."""

import os
import signal
import subprocess
import sys
import threading
from errno import ENOLCK

import pytest

from diffquant.measure import cells as cells_
from diffquant.measure.sweep import cell
from diffquant.measure.sweep.cell import Worker, measure_all, remove_locks
from tests.support.sleepers import scores, sleeping_run
from tests.support.tables import in_one_test

HOLD = """
import sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1], fallback_to_soft=False):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path):
    """Two cells, of which another process holds the first, and that process."""
    run = sleeping_run(tmp_path / "cells", 1, 2, 0.0)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(run.cells[0].lock_path)], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    yield run, other
    other.kill()
    other.wait()
    other.stdout.close()


def test_a_cell_that_another_process_holds_is_left_to_it(held):
    run, _ = held
    assert not Worker(run).measure(0)
    assert Worker(run).measure(1)
    assert scores(run.cells[0].folder).keys() == {"cell 1"}
    remove_locks(run.cells)
    assert run.cells[0].lock_path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_and_not_waited_for_holds_nothing(held, number):
    run, other = held
    other.send_signal(number)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    measure_all(run)
    assert len(scores(run.cells[0].folder)) == 2
    assert {file.suffix for file in run.cells[0].folder.iterdir()} == {".json"}


def test_the_others_are_measured_first_and_then_the_held_one_is_waited_for(held):
    run, other = held
    waiting = threading.Thread(target=measure_all, args=(run,))
    waiting.start()
    while len(scores(run.cells[0].folder)) < 1:
        threading.Event().wait(0.05)
    other.kill()
    waiting.join(60)
    assert len(scores(run.cells[0].folder)) == 2


def test_of_many_threads_one_measures_a_cell(tmp_path, monkeypatch):
    run = sleeping_run(tmp_path, 1, 3, 0.05)
    measured, measure = [], Worker._measure
    monkeypatch.setattr(Worker, "_measure", lambda self, *given: measured.append(given) or measure(self, *given))
    threads = [threading.Thread(target=measure_all, args=(run,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 3
    assert {file.suffix for file in tmp_path.iterdir()} == {".json"}


def interrupted_at(event, run):
    """Measure cells, interrupted at a line of the modules that lock and write; returns whether there are so many."""
    count = 0

    def trace(frame, kind, _):
        nonlocal count
        if frame.f_code.co_filename not in (cell.__file__, cells_.__file__):
            return None
        if kind == "line":
            count += 1
            if count == event:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        measure_all(run)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_after_an_interrupt_at_any_line_the_next_run_ends_whole(tmp_path):
    event, expected = 0, {}
    while interrupted_at(event := event + 1, sleeping_run(tmp_path / f"at {event}", 1, 2, 0.0)):
        folder = tmp_path / f"at {event}"
        again = sleeping_run(folder, 1, 2, 0.0)
        # No lock is held, or these would wait for ever.
        assert all(Worker(again).measure(number) for number in range(len(again.cells)))
        expected = expected or scores(folder)
        assert scores(folder) == expected
        assert len(scores(folder)) == 2
    assert event > 50


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
@in_one_test("put", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.touch()])
def test_a_folder_pipe_loop_or_file_in_the_place_of_a_lock_is_in_nobodys_way(tmp_path, put):
    run = sleeping_run(tmp_path, 1, 2, 0.0)
    put(run.cells[0].lock_path)
    measure_all(run)
    assert len(scores(tmp_path)) == 2


def test_on_a_disk_without_locks_cells_are_measured_all_the_same(tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(ENOLCK, "no locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    measure_all(sleeping_run(tmp_path, 1, 2, 0.0))
    assert len(scores(tmp_path)) == 2
