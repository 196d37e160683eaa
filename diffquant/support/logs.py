"""Logs a message once, and never inside compiled code."""

import logging
from functools import cache

import torch


def log_once(logger: str, level: int, message: str, *values: object) -> None:
    """Log a message, once for each of its values.

    Compiled code skips it: a logger would break torch.compile's graph.
    """
    if not torch.compiler.is_compiling():
        _log_once(logger, level, message, *values)


@cache
def _log_once(logger: str, level: int, message: str, *values: object) -> None:
    logging.getLogger(logger).log(level, message, *values)
