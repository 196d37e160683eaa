"""Progress of long work, on stderr and only where someone watches."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

# Called with the work done, all of the work (same unit) and a few words about what is under way.
Progress = Callable[[float, float, str], None]

_UNDER_WAY = "{desc} {percentage:3.0f}%  {remaining} left{postfix}"
_DONE = "{desc} {percentage:3.0f}%  {elapsed}{postfix}"


def silent(done: float, total: float, what: str) -> None:
    """Report nothing."""


class TerminalProgress:
    """A progress line, redrawn at most five times a second and cut to the terminal's width.

    It shows a label, the share done, the time left and what is under way; when all is done, the time it took.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._line: tqdm[None] | None = None

    def __call__(self, done: float, total: float, what: str) -> None:
        share = done / total if total else 1.0
        line = self._line or self._start(share, what)
        line.set_postfix_str(what, refresh=False)
        if share < 1:
            line.update(share - line.n)
            self._line = line
            return
        line.n, line.bar_format, line.leave = share, _DONE, True
        line.close()
        self._line = None

    def _start(self, share: float, what: str) -> "tqdm[None]":
        # Here, since most commands end before they have progress to show.
        from tqdm import tqdm

        # What fails or is interrupted leaves nothing: a message follows. The time left is by the mean speed so far.
        return tqdm(
            desc=self.label,
            total=1.0,
            initial=share,
            postfix=what,
            file=sys.stderr,
            bar_format=_UNDER_WAY,
            mininterval=0.2,
            miniters=0,
            smoothing=0,
            leave=False,
            dynamic_ncols=True,
        )


def progress_for(label: str) -> Progress:
    """A progress line on a terminal, silence elsewhere."""
    return TerminalProgress(label) if sys.stderr.isatty() else silent
