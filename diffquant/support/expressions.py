"""Matches regular expressions of someone else's configuration, some of which would run for years."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

_CPU_SECONDS = 2
# Systems that limit no process's CPU time, and machines too busy to give it, end the process after this.
_SECONDS = 30
_NBYTES = 1 << 31
_PROGRAM = """
import json, re, sys
seconds, nbytes, expressions, names = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
except (ImportError, OSError, ValueError):
    pass
patterns, wrong = [], None
for expression in expressions:
    try:
        patterns.append(re.compile(expression))
    except (re.error, RecursionError, OverflowError) as error:
        wrong = f"{expression[:200]!r} is not a regular expression: {error}"
        break
found = [] if wrong else [next((i for i, each in enumerate(patterns) if each.match(name)), None) for name in names]
json.dump([wrong, found], sys.stdout)
"""
# Names and numbers of layers and experts, as diffquant writes them, cannot run long.
_PLAIN = re.compile(r"(?:[\w-]|\\[.-]|\((?:[0-9]{1,4}\|)*[0-9]{1,4}\))*\$?", re.ASCII)
_NUMBERS = re.compile(r"\(([^)]*)\)")


def first_matches(expressions: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Find the first expression that matches the beginning of each name, as `re.match` does.

    Expressions that could run long are matched in a separate process, which ends after 2 seconds of CPU time.

    Returns:
        The index of each name's expression, or None if none matches.

    Raises:
        ValueError: an expression is malformed, or matching takes longer than that.
    """
    if all(map(_is_plain, expressions)):
        patterns = [re.compile(each) for each in expressions]
        return [next((i for i, each in enumerate(patterns) if each.match(name)), None) for name in names]
    return list(_match_apart(tuple(expressions), tuple(names)))


def _is_plain(expression: str) -> bool:
    """Whether an expression is a name in which at most two numbers have distinct alternatives."""
    if not _PLAIN.fullmatch(expression):
        return False
    groups = [group.split("|") for group in _NUMBERS.findall(expression)]
    return len(groups) <= 2 and all(len(set(group)) == len(group) for group in groups)


# Verbs open a checkpoint more than once.
@lru_cache(maxsize=8)
def _match_apart(expressions: tuple[str, ...], names: tuple[str, ...]) -> list[int | None]:
    given = json.dumps([_CPU_SECONDS, _NBYTES, expressions, names])
    # Isolated: neither the current folder nor installed packages are imported from.
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _PROGRAM]
    try:
        ran = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS, check=True)
        wrong, found = json.loads(ran.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise ValueError(
            f"matching its {len(expressions)} regular expressions with {len(names)} names takes too much time or memory"
        ) from error
    if wrong:
        raise ValueError(wrong)
    return list(found)
