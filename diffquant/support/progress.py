"""Progress of long work on stderr: a redrawn line on a terminal, a line per minute in a log."""

import sys
import time
import weakref
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING

from diffquant.support.escaping import one_line

if TYPE_CHECKING:
    from tqdm import tqdm

# Called with the work done, the total (same unit) and a few words on the current step.
Progress = Callable[[float, float, str], None]

_UNDER_WAY = "{desc} {percentage:3.0f}%  {left} left{postfix}"
_DONE = "{desc} {percentage:3.0f}%  {elapsed}{postfix}"
_SECONDS_BETWEEN_LOG_LINES = 60.0


def silent(done: float, total: float, what: str) -> None:
    """Report nothing."""


class Countdown:
    """Estimates the time left from the mean speed so far; counts down between reports."""

    def __init__(self, share: float) -> None:
        self._start, self._started = share, time.monotonic()
        self._reported, self._left = self._started, 0.0
        self.share = share

    def report(self, share: float) -> None:
        """Record the share of the work that is done."""
        self.share, self._reported = share, time.monotonic()
        if share > self._start:
            self._left = (self._reported - self._started) * (1 - share) / (share - self._start)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float | None:
        """Seconds left, or None before the speed is known."""
        if self.share <= self._start:
            return None
        return max(0.0, self._left - (time.monotonic() - self._reported))


class TerminalProgress:
    """A progress line, redrawn at least once and at most five times a second, cut to the terminal's width.

    It shows a label, the share done, the time left and the current step; at the end, the time taken.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._line: tqdm[None] | None = None
        self._countdown = Countdown(0.0)
        self._stopped = Event()

    def __call__(self, done: float, total: float, what: str) -> None:
        share = done / total if total else 1.0
        line = self._line or self._start(share, what)
        line.set_postfix_str(one_line(what), refresh=False)
        self._countdown.report(share)
        if share < 1:
            line.update(share - line.n)
            return
        line.n, line.bar_format, line.leave = share, _DONE, True
        self.stop()

    def stop(self) -> None:
        """Stop drawing, and clear the line if the work is not done."""
        self._stopped.set()
        _drawing.discard(self)
        if self._line is not None:
            self._line.close()
            self._line = None

    def _start(self, share: float, what: str) -> "tqdm[None]":
        # Imported here, since most commands end before they have progress to show.
        from tqdm import tqdm

        self._countdown, self._stopped = countdown, stopped = Countdown(share), Event()

        class Line(tqdm):
            """A line that knows the time left."""

            @property
            def format_dict(self) -> dict[str, object]:
                left = countdown.left
                shown = "?" if left is None else self.format_interval(left)
                shown_values: dict[str, object] = super().format_dict
                return shown_values | {"left": shown}

        # Clear the line after a failure or interrupt: a message follows.
        self._line = Line(
            desc=self.label,
            total=1.0,
            initial=share,
            postfix=one_line(what),
            file=sys.stderr,
            bar_format=_UNDER_WAY,
            mininterval=0.2,
            miniters=0,
            leave=False,
            dynamic_ncols=True,
        )
        _drawing.add(self)
        Thread(target=_redraw, args=(weakref.ref(self._line), stopped), daemon=True).start()
        return self._line


def _redraw(line_of: "weakref.ref[tqdm[None]]", stopped: Event) -> None:
    """Redraw a line each second, so that its time counts down, while the line is referenced."""
    while not stopped.wait(1.0):
        line = line_of()
        if line is None:
            return
        line.refresh()
        del line


# Lines on the terminal, which an error message has to clear.
_drawing: "weakref.WeakSet[TerminalProgress]" = weakref.WeakSet()


def clear_lines() -> None:
    """Clear the lines of unfinished work from the terminal before a message."""
    for progress in list(_drawing):
        progress.stop()


class LogProgress:
    """A line per minute: a label, the share done, the time taken and left, and the current step."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._countdown: Countdown | None = None
        self._lines = 0

    def __call__(self, done: float, total: float, what: str) -> None:
        share = done / total if total else 1.0
        self._countdown = self._countdown or Countdown(share)
        self._countdown.report(share)
        elapsed = self._countdown.elapsed
        is_due = elapsed >= (self._lines + 1) * _SECONDS_BETWEEN_LOG_LINES
        if is_due or (share >= 1 and self._lines):
            self._lines = int(elapsed / _SECONDS_BETWEEN_LOG_LINES)
            left = self._countdown.left
            rest = f", about {_minutes(left)} left" if left and share < 1 else ""
            print(
                f"{self.label} {share:.0%} after {_minutes(elapsed)}{rest}: {one_line(what)}",
                file=sys.stderr,
                flush=True,
            )


def _minutes(seconds: float) -> str:
    """A duration as hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def progress_for(label: str) -> Progress:
    """A progress line on a terminal, and a line per minute in a log."""
    return TerminalProgress(label) if sys.stderr.isatty() else LogProgress(label)
