"""Claims: one process of any number holds a cell, and one that is gone holds nothing."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

import psutil
import pytest

from diffquant.bench.programs.sleepers import sleeping_work
from diffquant.sweep import claims, worker
from diffquant.sweep.claims import Claimant, Claims, latest_claims

ABSENT = "another machine"


@pytest.fixture
def now(monkeypatch):
    """The clock of who watches a claim, as a list of one time."""
    times = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: times[0])
    return times


def latest(folder):
    return latest_claims(os.listdir(folder))


def leave_claim(folder, name, number, pid, machine=None, seconds_ago=0):
    """A claim as a process leaves it, or as one left it that had its number so much before."""
    here = Claimant.here()
    path = folder / f"{name}.{number}.claim"
    started = psutil.Process(pid).create_time() if psutil.pid_exists(pid) else here.started
    claimant = Claimant(here.host, machine or here.machine, pid, started - seconds_ago)
    path.write_text(json.dumps(asdict(claimant)))
    return path


def dead_pid():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_number_that_another_process_has_by_now_holds_nothing(tmp_path):
    leave_claim(tmp_path, "held", 0, os.getpid())
    leave_claim(tmp_path, "left", 0, os.getpid(), seconds_ago=3600)
    lives = {name: Claims(tmp_path).life(name, 0) for name in ("held", "left")}
    assert lives == {"held": "alive", "left": "dead"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_latest_claim_is_the_one_of_the_highest_number_in_whatever_order_files_are_listed(order):
    names = [f"a.cell.{number}.claim" for number in (*order, 10)] + ["b.0.claim", "b.failed.json", "c.json"]
    assert latest_claims(names) == latest_claims(names[::-1]) == {"a.cell": 10, "b": 0}


def test_of_many_threads_one_gets_the_claim(tmp_path):
    together = threading.Barrier(16)
    taken = []

    def take():
        own = Claims(tmp_path)
        together.wait()
        taken.append(own.take("cell", {}))

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([claim for claim in taken if claim]) == 1
    assert latest(tmp_path) == {"cell": 0}


def test_what_is_done_leaves_no_claim_and_what_failed_keeps_the_count_of_deaths(tmp_path):
    leave_claim(tmp_path, "cell", 0, dead_pid())
    own = Claims(tmp_path)
    interrupted = own.take("cell", latest(tmp_path))
    assert interrupted.deaths == 1
    interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert latest(tmp_path) == {"cell": 0}
    with own.take("cell", latest(tmp_path)) as claim:
        assert claim.deaths == 1
        assert Claims(tmp_path).take("cell", latest(tmp_path)) is None
    assert not list(tmp_path.iterdir())


def interrupted_at(event, work):
    """Carry work out, interrupted at a line of the modules that claim; returns whether there are so many."""
    count = 0

    def trace(frame, kind, _):
        nonlocal count
        if frame.f_code.co_filename not in {claims.__file__, worker.__file__}:
            return None
        if kind == "line":
            count += 1
            if count == event:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        worker.Worker(work).run(is_patient=False)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_leaves_no_claim(tmp_path):
    event = 0
    left = []
    while interrupted_at(event := event + 1, sleeping_work(tmp_path / f"at {event}", 1, 2, 0.0)):
        left += [(event, file.name) for file in (tmp_path / f"at {event}").glob("*.claim")]
    assert event > 100
    assert not left


def test_a_process_that_was_killed_and_not_waited_for_holds_nothing(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    leave_claim(tmp_path, "cell", 0, killed.pid)
    assert Claims(tmp_path).life("cell", 0) == "alive"
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert Claims(tmp_path).life("cell", 0) == "dead"
    killed.wait()


def test_a_claim_of_another_machine_is_taken_over_when_it_was_not_touched_for_a_minute(tmp_path, now):
    path = leave_claim(tmp_path, "cell", 0, 1, ABSENT)
    own = Claims(tmp_path)
    assert own.life("cell", 0) == "unknown"
    now[0] += claims.STALE_SECONDS - 1
    assert own.take("cell", latest(tmp_path)) is None
    # The other's clock may be hours off: only a change of the time counts.
    os.utime(path, ns=(5, 5))
    assert own.life("cell", 0) == "alive"
    now[0] += claims.STALE_SECONDS - 1
    assert own.take("cell", latest(tmp_path)) is None
    now[0] += 2
    with own.take("cell", latest(tmp_path)) as claim:
        assert claim.deaths == 1


def test_a_claim_that_is_not_written_yet_is_anothers(tmp_path, now):
    (tmp_path / "cell.0.claim").touch()
    assert Claims(tmp_path).take("cell", latest(tmp_path)) is None


def test_a_holder_touches_its_claim_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_SECONDS_BETWEEN_BEATS", 0.01)
    path, before = tmp_path / "cell.0.claim", set(threading.enumerate())
    with Claims(tmp_path).take("cell", {}):
        (touching,) = set(threading.enumerate()) - before
        # A process that is about to end would wait for it for ever.
        assert touching.daemon
        os.utime(path, ns=(5, 5))
        while path.stat().st_mtime_ns == 5:
            threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert not list(tmp_path.iterdir())
