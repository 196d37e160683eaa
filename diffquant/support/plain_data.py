"""Parses, checks and hashes plain data, which is everything that JSON can hold, and matches untrusted expressions."""

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from diffquant.support.names import find_duplicates, first_few

# A JSON object; the code that reads it defines its fields.
JsonObject = dict[str, Any]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: the text is not JSON, repeats a name in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_encodable_text(value: object) -> bool:
    """Return whether a value is text that can be encoded as UTF-8; text in JSON may have lone surrogates."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def replace_nonfinite(content: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, with None."""
    if isinstance(content, dict):
        return {name: replace_nonfinite(value) for name, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content


def plain_data_digest(content: Any) -> str:
    """Return the SHA-256 of plain data, as hex; the order of an object's names does not matter.

    Data have the same digest before they are written as JSON and after they are read back.
    """
    written_and_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(written_and_read, sort_keys=True).encode()).hexdigest()


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = find_duplicates(name for name, _ in pairs)
        raise ValueError(f"it gives {first_few(map(repr, sorted(twice)), ', ')} twice")
    return entries


_CPU_SECONDS = 2
# Wall-clock limit in seconds, for systems that cannot limit CPU time and for busy machines.
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
# Expressions of names and layer or expert numbers, as diffquant writes them, are matched fast.
_PLAIN = re.compile(r"(?:[\w-]|\\[.-]|\((?:[0-9]{1,4}\|)*[0-9]{1,4}\))*\$?", re.ASCII)
_NUMBERS = re.compile(r"\(([^)]*)\)")


def match_names(expressions: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Find the first expression that matches the beginning of each name, as `re.match` does.

    Expressions that could run long are matched in a separate process, which ends after 2 seconds of CPU time.

    Returns:
        The index of each name's expression, or None if no expression matches.

    Raises:
        ValueError: an expression is malformed, or matching takes longer than 2 seconds.
    """
    if all(map(_is_plain, expressions)):
        patterns = [re.compile(each) for each in expressions]
        return [next((i for i, each in enumerate(patterns) if each.match(name)), None) for name in names]
    return list(_match_in_subprocess(tuple(expressions), tuple(names)))


def _is_plain(expression: str) -> bool:
    """Return whether an expression is a name in which at most two numbers have distinct alternatives."""
    if not _PLAIN.fullmatch(expression):
        return False
    groups = [group.split("|") for group in _NUMBERS.findall(expression)]
    return len(groups) <= 2 and all(len(set(group)) == len(group) for group in groups)


# Cached, since verbs open a checkpoint more than once.
@lru_cache(maxsize=8)
def _match_in_subprocess(expressions: tuple[str, ...], names: tuple[str, ...]) -> list[int | None]:
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
