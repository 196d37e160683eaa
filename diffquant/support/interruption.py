"""Ctrl-C and SIGTERM, which schedulers send: both raise KeyboardInterrupt, and it is remembered that one came."""

import signal
from types import FrameType
from typing import NoReturn

_came: list[int] = []


def watch() -> None:
    """Have both raise KeyboardInterrupt, unless they are ignored or another handles them."""
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupt)


def came() -> bool:
    """Whether one came: compiled modules turn what interrupts their import into errors of their own."""
    return bool(_came)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    _came.append(number)
    raise KeyboardInterrupt
