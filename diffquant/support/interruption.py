"""Turns Ctrl-C, SIGTERM (schedulers) and SIGHUP (a closed terminal) into KeyboardInterrupt, and remembers it."""

import signal
from types import FrameType
from typing import NoReturn

_came: list[int] = []


def watch() -> None:
    """Make these signals raise KeyboardInterrupt, unless they are ignored, as under nohup, or already handled."""
    # Windows has no SIGHUP.
    stopping = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
    for number, usual in (*((each, signal.SIG_DFL) for each in stopping), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupt)


def came() -> bool:
    """Whether a signal came; needed because compiled modules turn an interrupted import into another error."""
    return bool(_came)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    _came.append(number)
    raise KeyboardInterrupt
