"""Turns Ctrl-C and SIGTERM, which schedulers send, into KeyboardInterrupt, and remembers that one came."""

import signal
from types import FrameType
from typing import NoReturn

_came: list[int] = []


def watch() -> None:
    """Make both signals raise KeyboardInterrupt, unless they are ignored or already handled."""
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupt)


def came() -> bool:
    """Whether a signal came; needed because compiled modules turn an interrupted import into another error."""
    return bool(_came)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    _came.append(number)
    raise KeyboardInterrupt
