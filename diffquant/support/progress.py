"""Progress of long work, on stderr and only where someone watches."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

# Called with the work done, all of the work (same unit) and a few words about what is under way.
Progress = Callable[[float, float, str], None]


def silent(done: float, total: float, what: str) -> None:
    """Report nothing."""


class TerminalProgress:
    """One line, redrawn at most five times a second: share done, time left, what is under way."""

    def __init__(self, label: str, stream: TextIO = sys.stderr) -> None:
        self.label = label
        self.stream = stream
        self.started = time.monotonic()
        self.drawn = 0.0

    def __call__(self, done: float, total: float, what: str) -> None:
        now = time.monotonic()
        if done < total and now - self.drawn < 0.2:
            return
        self.drawn = now
        share = done / total if total else 1.0
        left = (now - self.started) * (1 - share) / share if share > 0 else float("nan")
        timing = f"{_clock(left)} left" if 0 < share < 1 else _clock(now - self.started)
        self.stream.write(f"\r\x1b[K{self.label} {share:4.0%}  {timing}  {what}")
        self.stream.write("\n" if done >= total else "")
        self.stream.flush()
        if done >= total:
            # What is told next is other work, with a time of its own.
            self.started = now


def progress_for(label: str) -> Progress:
    """A progress line on a terminal, silence elsewhere."""
    return TerminalProgress(label) if sys.stderr.isatty() else silent


def _clock(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
