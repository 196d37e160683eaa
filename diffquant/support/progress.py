"""Progress of long work on stderr: a line that is redrawn on a terminal, a line per minute in a log."""

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from diffquant.support.durations import spoken
from diffquant.support.escaping import one_line

if TYPE_CHECKING:
    from tqdm import tqdm

# Called with the work done, all of the work (same unit) and a few words about what is under way.
Progress = Callable[[float, float, str], None]

_UNDER_WAY = "{desc} {percentage:3.0f}%  {left} left{postfix}"
_DONE = "{desc} {percentage:3.0f}%  {elapsed}{postfix}"
_SECONDS_BETWEEN_LOG_LINES = 60.0
# How much of the step under way may be thought done before it is reported.
_OF_A_STEP = 0.9


def silent(done: float, total: float, what: str) -> None:
    """Report nothing."""


class Countdown:
    """The time that work will take, by its mean speed so far.

    Between two reports it runs down at that speed, as far as the end of a step like the last one. If the step under way
    takes longer, the mean that the clock then gives says what is left: never nothing while there is work.
    """

    def __init__(self, share: float) -> None:
        self._start, self._started = share, time.monotonic()
        self._reported, self._step = self._started, 0.0
        self.share = share

    def report(self, share: float) -> None:
        """Record the share of the work that is done."""
        self._step = share - self.share or self._step
        self.share, self._reported = share, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float | None:
        """Seconds left, or None before the speed is known."""
        done, measured = self.share - self._start, self._reported - self._started
        if done <= 0:
            return None
        at_this_speed = done * self.elapsed / measured if measured else done
        reached = min(at_this_speed, done + _OF_A_STEP * min(self._step, 1 - self.share))
        return self.elapsed * (1 - self._start - reached) / reached


class TerminalProgress:
    """A progress line, redrawn each second, at most five times a second, and cut to the terminal's width.

    It shows a label, the share done, the time left and what is under way; when all is done, the time it took.
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

    def aside(self) -> None:
        """Make room for a line; this one comes back a second later."""
        if self._line is not None:
            self._line.clear()

    def stop(self) -> None:
        """Draw no more; a line of work that is not done goes away."""
        self._stopped.set()
        _drawing.discard(self)
        if self._line is not None:
            self._line.close()
            self._line = None

    def _start(self, share: float, what: str) -> "tqdm[None]":
        for line in list(_drawing):
            if isinstance(line, Waiting):
                line.stop()
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

        # What fails or is interrupted leaves nothing: a message follows.
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
    """Redraw a line each second, so that its time runs down, for as long as someone holds it."""
    while not stopped.wait(1.0):
        line = line_of()
        if line is None:
            return
        line.refresh()
        del line


class Waiting:
    """A line on a terminal that says what is waited for, and after a second for how long, until it is stopped.

    It stands there before anything heavy is imported, and goes away by itself where a progress line begins.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._started, self._stopped, self._lock = time.monotonic(), Event(), Lock()
        self._draw(text)
        _drawing.add(self)
        Thread(target=self._tick, daemon=True).start()

    def stop(self) -> None:
        """Take the line away."""
        with self._lock:
            if not self._stopped.is_set():
                self._stopped.set()
                self._draw("")
        _drawing.discard(self)

    def aside(self) -> None:
        """Make room for a line; this one comes back a second later."""
        with self._lock:
            if not self._stopped.is_set():
                self._draw("")

    def _tick(self) -> None:
        while not self._stopped.wait(1.0):
            with self._lock:
                if not self._stopped.is_set():
                    self._draw(f"{self._text} {time.monotonic() - self._started:.0f} s")

    def _draw(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Give a sign of life on a terminal while torch is imported, which may take longer than people wait for one."""
    line = Waiting(text) if sys.stderr.isatty() and "torch" not in sys.modules else None
    try:
        yield
    finally:
        if line is not None:
            line.stop()


# Lines that are on the terminal, which an error's message has to clear.
_drawing: "weakref.WeakSet[TerminalProgress | Waiting]" = weakref.WeakSet()


def clear_lines() -> None:
    """Take the lines of unfinished work off the terminal, so that a message can stand there."""
    for line in list(_drawing):
        line.stop()


def make_room() -> None:
    """Let a line be printed where it is waited for something that goes on."""
    for line in list(_drawing):
        line.aside()


class LogProgress:
    """A line for each minute of work: a label, the share done, the time taken and left, and what is under way."""

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
            rest = f", about {spoken(left)} left" if left and share < 1 else ""
            print(
                f"{self.label} {share:.0%} after {_minutes(elapsed)}{rest}: {one_line(what)}",
                file=sys.stderr,
                flush=True,
            )


def _minutes(seconds: float) -> str:
    """A time as hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def progress_for(label: str) -> Progress:
    """A progress line on a terminal, and a line per minute in a log."""
    return TerminalProgress(label) if sys.stderr.isatty() else LogProgress(label)
