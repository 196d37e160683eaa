"""Messages that are logged once, and not by code that is being compiled."""

import logging
from functools import cache

import torch


def log_once(logger: str, level: int, message: str, *values: object) -> None:
    """Log a message, once for each of its values.

    Compiled code leaves it out: where torch.compile meets a logger, it ends its graph.
    """
    if not torch.compiler.is_compiling():
        _log_once(logger, level, message, *values)


@cache
def _log_once(logger: str, level: int, message: str, *values: object) -> None:
    logging.getLogger(logger).log(level, message, *values)
