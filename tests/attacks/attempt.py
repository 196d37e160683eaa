"""A command in a process that may take little time and memory, and is watched for what no command does with a file."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffquant.support.program import exit_codes

_CPU_SECONDS, _SECONDS, _GIGABYTES = 15, 60, 2
# Events of Python by which a stranger's code runs, or by which it would be noticed.
_RUNS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "pickle.find_class", "socket.connect", "marshal.loads"}


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: its exit status, negative for a signal; what it printed; what it must not have done."""

    status: int
    said: str
    broke: tuple[str, ...]


def attempt(work: Callable[[], object], folder: Path) -> Ended:
    """Do what the command line would, in a process of its own.

    Args:
        folder: where the hostile files are. Of its parent nothing else may be opened but what is made there as output,
            "out" and what begins with it; no code may be compiled or run that lies there.
    """
    log, note = folder.with_name("said"), folder.with_name("broke")
    for file in (log, note):
        file.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _in_child(work, folder, log, note)
    end = time.monotonic() + _SECONDS
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended(-signal.SIGKILL, log.read_text(errors="replace"), (f"no end after {_SECONDS} s",))
        time.sleep(0.01)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    broke = tuple(sorted(set(note.read_text(errors="replace").splitlines()))) if note.exists() else ()
    return Ended(status, log.read_text(errors="replace"), broke)


def _in_child(work: Callable[[], object], folder: Path, log: Path, note: Path) -> None:
    status = 70
    try:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        # pytest's own streams would take what is printed.
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        # It stays open: opening it in the hook would call the hook.
        notes = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.chdir(folder.parent)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (_GIGABYTES << 30),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS,) * 2)
        sys.addaudithook(lambda event, given: _notice(event, given, folder, notes))
        status = status_of(work)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def status_of(work: Callable[[], object]) -> int:
    """The exit status with which the command line would end after some work."""
    try:
        with exit_codes():
            work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _notice(event: str, given: tuple[object, ...], folder: Path, notes: int) -> None:
    if event == "open" and isinstance(given[0], str | bytes):
        path = os.path.abspath(os.fsdecode(given[0]))
        # Where a link leads to is what is read.
        inside = os.path.commonpath([folder.parent, path]) == str(folder.parent)
        real = Path(os.path.realpath(path))
        allowed = real.is_relative_to(folder) or real.name.startswith((".out", "out", ".index", "index"))
        allowed = allowed or any(part.startswith((".out", "out")) for part in real.parts[len(folder.parts) - 1 :])
        wrong = inside and not allowed and real != folder.parent
    elif event in ("exec", "compile"):
        code = given[0] if event == "exec" else given[1]
        name = getattr(code, "co_filename", code)
        wrong = isinstance(name, str) and name.startswith(str(folder.parent))
    else:
        wrong = event in _RUNS and not _is_own(event, given)
    if wrong:
        os.write(notes, f"{event} {str(given)[:200]}\n".encode(errors="replace"))


def _is_own(event: str, given: tuple[object, ...]) -> bool:
    """Whether an event is one of ours: Python loads its own modules by marshal."""
    return event == "marshal.loads"
