"""Commands on a terminal, watched: what they write, and when."""

import os
import pty
import re
import selectors
import struct
import subprocess
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import NamedTuple

import psutil

COLUMNS = 80
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Ran(NamedTuple):
    """What came of a command: what it wrote, how long it took, and its longest silence."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    silence: float


def run(command: str, folder: Path, environment: dict[str, str]) -> Ran:
    """Run a shell command whose stdout and stderr are terminals of 80 columns, and watch what comes when."""
    ends = [pty.openpty() for _ in range(2)]
    for _, theirs in ends:
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    started = last = time.monotonic()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=ends[0][1],
        stderr=ends[1][1],
    ) as process:
        for _, theirs in ends:
            os.close(theirs)
        selector = selectors.DefaultSelector()
        heard = {ours: b"" for ours, _ in ends}
        for ours in heard:
            selector.register(ours, selectors.EVENT_READ)
        silence = waited = 0.0
        before: dict[Path, float] = {}
        while selector.get_map():
            ready = selector.select(timeout=1.0)
            if not ready:
                now = waits(process.pid)
                before = before or now
                waited = max((wait - before.get(thread, 0.0) for thread, wait in now.items()), default=waited)
            for key, _ in ready:
                try:
                    part = os.read(key.fd, 65536)
                except OSError:
                    part = b""
                if not part:
                    selector.unregister(key.fd)
                    continue
                silence, last = max(silence, time.monotonic() - last - waited), time.monotonic()
                waited, before = 0.0, {}
                heard[key.fd] += part
        _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    silence = max(silence, time.monotonic() - last - waited)
    for ours in heard:
        os.close(ours)
    stdout, stderr = (_ESCAPES.sub("", part.decode(errors="replace")).replace("\r\n", "\n") for part in heard.values())
    return Ran(process.returncode, stdout, stderr, time.monotonic() - started, silence)


def waits(process: int) -> dict[Path, float]:
    """Seconds that each thread of a process, and of those that it started, has waited for a core so far."""
    found = {}
    try:
        root = psutil.Process(process)
        family = [root.pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return {}
    for file in (file for pid in family for file in Path(f"/proc/{pid}/task").glob("*/schedstat")):
        try:
            found[file] = int(file.read_text().split()[1]) / 1e9
        except OSError:  # the thread has ended
            continue
    return found
