"""Claims: files beside a sweep's cells that say which process measures which cell.

A process claims a cell by creating a file that must not exist yet; only one process can, on NFS too. It then touches
the file every few seconds. If it dies, another process claims the cell with the next number, so the number counts the
holders that died. Two holders of one cell would do no harm: they write the same result.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Literal, Self

import psutil

from diffquant.support.files import check_plain, read_text, set_folder_aside

_SECONDS_BETWEEN_BEATS = 5.0
# A claim that nobody touched for this long, by the watching process's clock, is free again. Opening a file makes NFS
# show its new time.
STALE_SECONDS = 60.0

_SECONDS_THAT_CLOCKS_MOVE = 30.0

_SUFFIX = ".claim"
# No cell outlives so many holders that their number has more digits.
_DIGITS = 4


@dataclass(frozen=True)
class Claimant:
    """A process that claims cells.

    Attributes:
        host: name of its machine, for people.
        machine: id of the machine's boot and of the container, since each numbers its own processes.
        pid: number of the process there.
        started: start of the process in seconds since 1970, since process numbers are reused.
    """

    host: str
    machine: str
    pid: int
    started: float

    @classmethod
    def here(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time())

    def is_dead(self) -> bool | None:
        """Whether the process has ended, or None if it runs on another machine, where we cannot see it."""
        if self.machine != _machine():
            return None
        try:
            process = psutil.Process(self.pid)
            # Setting the clock shifts the start time that the system reports for a process.
            is_another = abs(process.create_time() - self.started) > _SECONDS_THAT_CLOCKS_MOVE
            return bool(is_another or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


# State of a claim's holder. For one on another machine we have to see its file touched, or left alone for long.
Life = Literal["alive", "dead", "unknown"]


class Claim:
    """A claim of this process, as a context manager; leaving it without an error means that the work is done.

    Attributes:
        deaths: number of earlier holders that died.
    """

    def __init__(self, path: Path, name: str, deaths: int) -> None:
        self._path, self._name, self.deaths = path, name, deaths
        self._released = Event()

    def make(self) -> bool:
        """Create the claim's file; returns False if another process was faster."""
        try:
            with self._path.open("x", encoding="utf-8") as file:
                json.dump(asdict(Claimant.here()), file)
        except FileExistsError:
            return False
        Thread(target=self._beat, daemon=True).start()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, earlier claims stay, and with them the number of deaths. Our own goes last: without it
        # an earlier one would be the latest.
        for number in range(0 if kind is None else self.deaths, self.deaths + 1):
            with suppress(OSError):
                _path_of(self._path.parent, self._name, number).unlink()
        self._released.set()

    def let_go(self) -> None:
        """Release the claim if we hold it; an interrupt may have come while it was made or released."""
        if self._released.is_set():
            return
        self._released.set()
        with suppress(OSError):
            if _claimant(read_text(self._path)) in (Claimant.here(), None):
                self._path.unlink()

    def _beat(self) -> None:
        while not self._released.wait(_SECONDS_BETWEEN_BEATS):
            with suppress(OSError):
                os.utime(self._path)


class Claims:
    """The claims in a folder as one process sees and makes them; leaving this context releases all of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # For each claim: its file's time, when we first saw that time, and whether we saw an earlier one.
        self._watched: dict[str, tuple[int, float, bool]] = {}
        self._tried: Claim | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tried is not None:
            self._tried.let_go()

    def take(self, name: str, latest: Mapping[str, int]) -> Claim | None:
        """Claim a name that is free or whose holder is gone, or return None if another process holds it. One at a time.

        Args:
            latest: numbers of the claims in the folder, as `latest_claims` gives them.

        Raises:
            OSError: the folder is gone, or cannot be written.
        """
        if name in latest and self.life(name, latest[name]) != "dead":
            return None
        number = latest.get(name, -1) + 1
        # Known before its file exists: an interrupt may come in between.
        self._tried = Claim(_path_of(self.folder, name, number), name, number)
        if not self._tried.make():
            self._tried = None
        return self._tried

    def clear(self, names: Iterable[str], latest: Mapping[str, int]) -> None:
        """Remove claims that dead processes left on finished cells."""
        for name in names:
            if name in latest and self.life(name, latest[name]) == "dead":
                for number in range(latest[name] + 1):
                    path = _path_of(self.folder, name, number)
                    set_folder_aside(path)
                    path.unlink(missing_ok=True)

    def life(self, name: str, number: int) -> Life:
        """State of a claim's holder; watching it longer tells more."""
        path = _path_of(self.folder, name, number)
        try:
            check_plain(path)
            with path.open(encoding="utf-8") as file:
                time_of_beat = os.fstat(file.fileno()).st_mtime_ns
                claimant = _claimant(file.read())
        except FileNotFoundError:
            return "unknown"  # Released in the meantime; the next look will show that.
        except (OSError, ValueError):
            # Something else lies there, which nobody touches.
            time_of_beat, claimant = path.lstat().st_mtime_ns, None
        is_dead = None if claimant is None else claimant.is_dead()
        if is_dead is not None:
            return "dead" if is_dead else "alive"
        now = time.monotonic()
        known, since, has_beaten = self._watched.get(path.name, (time_of_beat, now, False))
        if known != time_of_beat:
            since, has_beaten = now, True
        self._watched[path.name] = (time_of_beat, since, has_beaten)
        if now - since > STALE_SECONDS:
            return "dead"
        return "alive" if has_beaten else "unknown"


def latest_claims(names: Iterable[str]) -> dict[str, int]:
    """Number of the latest claim on each claimed name, read from a folder's file names."""
    latest: dict[str, int] = {}
    for file in names:
        if file.endswith(_SUFFIX):
            name, _, number = file.removesuffix(_SUFFIX).rpartition(".")
            if number.isdecimal() and len(number) <= _DIGITS:
                latest[name] = max(int(number), latest.get(name, -1))
    return latest


def _path_of(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.{number}{_SUFFIX}"


def _claimant(text: str) -> Claimant | None:
    """The process that made a claim, or None if its file is not written yet."""
    try:
        return Claimant(**json.loads(text))
    except (ValueError, TypeError):
        return None


@cache
def _machine() -> str:
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {start} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
