"""Verbs of which one call fails: the N-th write, sync, rename or other call on a file, or the N-th for much memory.

The disk is full or damaged, a quota is used up, a write is made by half, memory is not given. Each time the verb has to
end with one error, or to do without what failed; nothing half-written may stand under the output's name, what was there
before stays, and the next run makes what a run makes that nothing disturbs.

    python -m tests.fuzz.failures              # every call of quantize, export and sweep; prints what went wrong
    python -m tests.fuzz.failures --each 40    # one of 40, others for another --seed
"""

import argparse
import ctypes
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from diffquant.errors import OutputExistsError
from diffquant.support.program import exit_codes
from tests.fuzz.kills import VERBS, Verb

_SOURCE = Path(__file__).with_name("failing_calls.c")
_LIBRARY = "DIFFQUANT_FAILING_CALLS"
_FILES, _MEMORY = 1, 2
_ONCE, _FULL, _SHORT = 0, 1, 2
_ENDED_BY_LOADER = 127
# Smaller pieces Python and torch take by the million.
_LEAST_BYTES = 1 << 14
NAMES = ("quantize", "quantize --overwrite", "export", "sweep", "convert", "calibrate", "search")
DEFAULT = NAMES[:4]


@dataclass(frozen=True)
class Kind:
    """A kind of failure.

    Attributes:
        name: what fails, for people.
        watched: number of what is watched, files or memory.
        errors: error numbers, of which each call takes one in turn.
        manner: number of how it fails: once, from there on, or by writing half.
    """

    name: str
    watched: int
    errors: tuple[int, ...]
    manner: int = _ONCE


KINDS = (
    Kind("a call on a file fails", _FILES, (errno.EIO, errno.ENOSPC, errno.EDQUOT)),
    Kind("the disk is full from there on", _FILES, (errno.ENOSPC, errno.EDQUOT), _FULL),
    Kind("half is written", _FILES, (0,), _SHORT),
    Kind("there is no memory", _MEMORY, (errno.ENOMEM,)),
)


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit status, negative for a signal; what it printed; how many calls failed, and which."""

    status: int
    said: str
    count: int
    failed: int
    what: str


class Calls:
    """The calls of this process, which was started with the library that lets them fail."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[_LIBRARY])
        for name in ("count", "failed"):
            getattr(self._library, f"failing_calls_{name}").restype = ctypes.c_long
        self._library.failing_calls_what.restype = ctypes.c_char_p

    def run(self, work: Callable[[], object], place: Path, kind: Kind | None = None, at: int = 0) -> Ended:
        """Run in a new process what the command line would, with one call failing in it.

        Args:
            place: folder whose files are watched; beside it the process notes what it does.
            kind: what fails; nothing where it is None, and nothing where `at` is 0, when calls are counted.
            at: number of the call that fails, counted from 1.
        """
        log, note = place.with_name("log"), place.with_name("note")
        note.unlink(missing_ok=True)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 70
            try:
                with log.open("w") as stream:
                    os.dup2(stream.fileno(), 1)
                    os.dup2(stream.fileno(), 2)
                if kind:
                    error = kind.errors[at % len(kind.errors)]
                    self._arm(kind.watched, str(place).encode(), _LEAST_BYTES, at, error, kind.manner)
                status = _status_of(work)
            finally:
                made = (self._library.failing_calls_count(), self._library.failing_calls_failed())
                what = self._library.failing_calls_what()
                self._arm(0, b"", 0, 0, 0, 0)
                sys.stdout.flush()
                sys.stderr.flush()
                note.write_text(f"{made[0]} {made[1]} {what.decode()}")
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        count, failed, what = note.read_text().split(" ", 2) if note.exists() else ("0", "1", "and the process ended")
        return Ended(status, log.read_text(errors="replace"), int(count), int(failed), what.replace(str(place), "."))

    def _arm(self, watched: int, folder: bytes, least: int, at: int, error: int, manner: int) -> None:
        arm = self._library.failing_calls_arm
        arm(watched, folder, ctypes.c_size_t(least), ctypes.c_long(at), error, manner)


def _status_of(work: Callable[[], object]) -> int:
    try:
        with exit_codes():
            work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


class Trial:
    """A verb whose calls fail in turn.

    Args:
        calls: calls of this process.
        verb: what runs.
        folder: empty folder to work in.
    """

    def __init__(self, calls: Calls, verb: Verb, folder: Path) -> None:
        self._calls, self._verb = calls, verb
        self._inputs, self._place = folder / "inputs", folder / "run"
        verb.prepare(self._inputs)
        self._output = self._place / "out"
        self._input_files = _contents(self._inputs)
        self._prepare()
        ended = calls.run(lambda: verb.run(self._inputs, self._output), self._place)
        if ended.status:
            raise RuntimeError(f"{verb.name} fails by itself: {ended.said}")
        self._expected = verb.result(self._output)

    def count(self, kind: Kind) -> int:
        """Number of calls that a whole run makes."""
        self._prepare()
        return self._run(kind, 0).count

    def problem(self, kind: Kind, at: int) -> str | None:
        """What is wrong after the failure of a call, or None if nothing is, or the run made no such call."""
        self._prepare()
        old = _contents(self._output)
        ended = self._run(kind, at)
        if not ended.failed:
            return None
        what = f"{self._verb.name}, {kind.name} at {at} ({ended.what})"
        for found in (self._said(kind, ended), self._kept(old, ended), self._next()):
            if found:
                return f"{what}: {found}"
        return None

    def _prepare(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        (self._place / "notes.txt").write_text("kept")
        if self._verb.old is not None:
            old, inputs, output = self._verb.old, self._inputs, self._output
            if self._calls.run(lambda: old(inputs, output), self._place).status:
                raise RuntimeError(f"{self._verb.name}: there is no older output")

    def _run(self, kind: Kind | None, at: int) -> Ended:
        return self._calls.run(lambda: self._verb.run(self._inputs, self._output), self._place, kind, at)

    def _said(self, kind: Kind, ended: Ended) -> str | None:
        errors = [line for line in ended.said.splitlines() if line.startswith("error: ")]
        if ended.status == 0:
            return None if _equal(self._verb, self._output, self._expected) else "exit status 0 and another output"
        if kind.watched == _MEMORY and (ended.status < 0 or ended.status == _ENDED_BY_LOADER):
            return None  # Libraries in Rust, protobuf and the C library end the process; what it leaves counts below.
        is_clean = len(errors) == 1 and "bug in diffquant" not in ended.said and "Traceback" not in ended.said
        # 2: it was seen before the work that nothing can be written. 3: single cells of a sweep had no memory.
        if ended.status not in (1, 2, 3) or not is_clean:
            return f"exit status {ended.status}: {ended.said.strip()[-400:]}"
        return None

    def _kept(self, old: object, ended: Ended) -> str | None:
        if (self._place / "notes.txt").read_text() != "kept" or _contents(self._inputs) != self._input_files:
            return "changed a file that is not its own"
        if not self._output.exists() and old is None:
            return None
        # A sweep's cells appear one by one, each whole: the next run reads them.
        if self._verb.name in ("sweep", "search") or _equal(self._verb, self._output, self._expected):
            return None
        return None if old is not None and _contents(self._output) == old else f"half an output: {ended.said[-300:]}"

    def _next(self) -> str | None:
        def again() -> None:
            try:
                self._verb.run(self._inputs, self._output)
            except OutputExistsError:
                # What failed came after the output was in place.
                if not self._output.exists():
                    raise

        ended = self._calls.run(again, self._place)
        if ended.status:
            return f"the next run failed: {ended.said.strip()[-400:]}"
        if not _equal(self._verb, self._output, self._expected):
            return "the next run made another output"
        left = sorted(entry.name for entry in self._place.iterdir() if entry.name not in ("out", "notes.txt"))
        return f"left behind: {', '.join(left)}" if left else None


def _contents(path: Path) -> object:
    """The bytes of a file, or of each file of a folder; None if there is neither."""
    if path.is_dir():
        return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    return path.read_bytes() if path.exists() else None


def _equal(verb: Verb, output: Path, expected: object) -> bool:
    try:
        return verb.result(output) == expected
    except (OSError, StopIteration, ValueError):
        return False


def _chosen(count: int, each: int, chance: random.Random) -> Iterator[int]:
    """One number of each so many, counted from 1."""
    for first in range(1, count + 1, each):
        at = first + chance.randrange(each)
        if at <= count:
            yield at


def library(folder: Path) -> Path | None:
    """Compile the library that lets calls fail, or return None where there is no compiler for it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    file = folder / "failing_calls.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(file), str(_SOURCE), "-ldl"], check=True)
    return file


def preloaded(library: Path) -> dict[str, str]:
    """The environment in which this program lets calls fail."""
    return {**os.environ, "LD_PRELOAD": str(library), _LIBRARY: str(library), "PYTHONMALLOC": "malloc"}


def _try_all(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    calls, chance = Calls(), random.Random(arguments.seed)
    all_well = True
    for verb in VERBS:
        if verb.name not in arguments.verb:
            continue
        with tempfile.TemporaryDirectory() as folder:
            # What the runs import is imported once.
            verb.prepare(Path(folder, "first"))
            verb.run(Path(folder, "first"), Path(folder, "warm"))
            trial = Trial(calls, verb, Path(folder, "trial"))
            for kind in KINDS:
                if arguments.kind not in kind.name:
                    continue
                count, tried = trial.count(kind), Counter[bool]()
                for at in _chosen(count, arguments.each, chance):
                    problem = trial.problem(kind, at)
                    tried[problem is None] += 1
                    if problem:
                        print(problem, flush=True)
                all_well = all_well and not tried[False]
                print(f"{verb.name}, {kind.name}: {tried[True]} of {tried.total()} well, of {count} calls", flush=True)
    return 0 if all_well else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=1, help="One call of so many fails.")
    parser.add_argument("--seed", type=int, default=0, help="Which of them.")
    parser.add_argument("--verb", action="append", choices=NAMES, help="Verbs; by default the first four.")
    parser.add_argument("--kind", default="", help="Only kinds whose name contains it.")
    arguments = parser.parse_args()
    arguments.verb = arguments.verb or DEFAULT
    if _LIBRARY in os.environ:
        return _try_all(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = library(Path(folder))
        if file is None:
            print("not run: it needs a C compiler and Linux")
            return 5
        command = [sys.executable, "-m", "tests.fuzz.failures", *sys.argv[1:]]
        return subprocess.run(command, env=preloaded(file)).returncode


if __name__ == "__main__":
    raise SystemExit(main())
