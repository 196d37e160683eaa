"""Reports progress of long work on stderr: a redrawn line on a terminal, a line per minute in a log."""

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from threading import Event, Lock, Thread
from unicodedata import east_asian_width

from diffquant.support.terminal import one_line, terminal_width

# Called with the work done, all of the work (same unit) and a few words about the current step.
Progress = Callable[[float, float, str], None]

_SECONDS_BETWEEN_LOG_LINES = 60.0
_SECONDS_BETWEEN_DRAWINGS = 0.2
# Largest fraction of the current step that is assumed to be done before it is reported.
_OF_A_STEP = 0.9


def report_nothing(done: float, total: float, what: str) -> None:
    """Report nothing."""


class Countdown:
    """The time left, estimated from the mean speed so far.

    Between two reports it counts down at that speed, until the current step has taken as long as the last one. If the
    step takes longer, the mean speed is taken to fall, so the time left stays above zero until the work is done.

    Args:
        share: share of the work that is already done, from 0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._start, self._started = share, time.monotonic()
        self._reported, self._step = self._started, 0.0
        self.share = share

    def report(self, share: float) -> None:
        """Record the share of the work that is done, from 0 to 1."""
        self._step = share - self.share or self._step
        self.share, self._reported = share, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Seconds left, or None before the speed is known."""
        done, measured = self.share - self._start, self._reported - self._started
        if done <= 0:
            return None
        at_this_speed = done * self.elapsed / measured if measured else done
        reached = min(at_this_speed, done + _OF_A_STEP * min(self._step, 1 - self.share))
        return self.elapsed * (1 - self._start - reached) / reached


class StatusLine:
    """A status line on a terminal, redrawn each second until it is stopped.

    There is one line at a time: a new line replaces the previous one.

    Args:
        text: function that returns the text to show, or None to stop the line.
    """

    def __init__(self, text: Callable[[], str | None]) -> None:
        clear_line()
        self._text, self._stopped, self._lock = text, Event(), Lock()
        _lines[:] = [self]
        self.draw()
        Thread(target=self._tick, daemon=True).start()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def draw(self) -> None:
        """Draw the current line."""
        text = self._text()
        if text is None:
            self.stop()
        else:
            self._write(text)

    def erase(self) -> None:
        """Erase the line so that other text can be printed; within a second it is drawn again."""
        self._write("")

    def stop(self, last: str = "") -> None:
        """Stop drawing. The text `last` stays on the terminal; if it is empty, the line is cleared."""
        self._write(last, is_last=True)

    def _tick(self) -> None:
        while not self._stopped.wait(1.0):
            self.draw()

    def _write(self, text: str, is_last: bool = False) -> None:
        # Up to the column before the last one, so that no terminal wraps the line.
        columns = (terminal_width(sys.stderr) or 80) - 1
        ends = accumulate(2 if east_asian_width(each) in "FW" else 1 for each in text)
        shown = "".join(each for each, end in zip(text, ends, strict=True) if end <= columns)
        with self._lock:
            if not self.is_stopped:
                if is_last:
                    self._stopped.set()
                sys.stderr.write(f"\r\x1b[K{shown}" + ("\n" if text and is_last else ""))
                sys.stderr.flush()


# The line on the terminal, if there is one.
_lines: list[StatusLine] = []


def clear_line() -> None:
    """Remove an unfinished status line from the terminal, so that a message can be printed."""
    for line in _lines:
        line.stop()


def hide_line_briefly() -> None:
    """Hide the status line for a second, so that other text can be printed."""
    for line in _lines:
        line.erase()


class TerminalProgress:
    """A progress line, drawn at most five times a second.

    It shows a label, the share done, the time left and the current step; at the end, the time it took.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._what, self._drawn = "", 0.0
        self._countdown = Countdown(0.0)
        self._line: StatusLine | None = None

    def __call__(self, done: float, total: float, what: str) -> None:
        share = done / total if total else 1.0
        self._what = one_line(what)
        if self._line is None or self._line.is_stopped:
            self._countdown = Countdown(share)
            # A progress object that is no longer used removes its line.
            progress = weakref.ref(self)
            self._line = StatusLine(lambda: None if (known := progress()) is None else known._under_way())
        self._countdown.report(share)
        now = time.monotonic()
        if share >= 1:
            self._line.stop(f"{self.label} 100%  {_format_clock(self._countdown.elapsed)}, {self._what}")
        elif now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._line.draw()

    def _under_way(self) -> str:
        left = self._countdown.seconds_left
        rest = "?" if left is None else _format_clock(left)
        return f"{self.label} {self._countdown.share:4.0%}  {rest} left, {self._what}"


@contextmanager
def show_waiting(text: str) -> Iterator[None]:
    """Show on a terminal that torch is being imported, which may take seconds.

    After a second the line shows the time so far. It is removed when progress is shown, and at the end.
    """
    if sys.stderr.isatty() and "torch" not in sys.modules:
        started = time.monotonic()
        StatusLine(lambda: f"{text} {seconds} s" if (seconds := round(time.monotonic() - started)) else text)
    try:
        yield
    finally:
        clear_line()


class LogProgress:
    """Progress in a log, with a line for each minute of work.

    A line has a label, the share done, the time taken, the time left and the current step.
    """

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
            left = self._countdown.seconds_left
            rest = f", about {format_duration(left)} left" if left and share < 1 else ""
            print(
                f"{self.label} {share:.0%} after {_format_minutes(elapsed)}{rest}: {one_line(what)}",
                file=sys.stderr,
                flush=True,
            )


def _format_minutes(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _format_clock(seconds: float) -> str:
    """Format a time as mm:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def progress_for(label: str) -> Progress:
    """Return a `TerminalProgress` if stderr is a terminal, otherwise a `LogProgress`."""
    return TerminalProgress(label) if sys.stderr.isatty() else LogProgress(label)


def format_duration(seconds: float) -> str:
    """Format a duration in a suitable unit: 8 s, 12 min, or 2 h 5 min."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else _format_minutes(seconds)
