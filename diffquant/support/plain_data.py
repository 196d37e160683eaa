"""Plain data: everything that JSON can hold."""

import hashlib
import json
import math
import re
from typing import Any

from diffquant.support.listing import first_few, repeated

# An object that JSON can write, whose reader knows its fields.
JsonObject = dict[str, Any]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: the text is not JSON, gives a name twice in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_text(value: object) -> bool:
    """Whether a value is a text that a tokenizer can read: JSON also names halves of a surrogate pair."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def finite(content: Any) -> Any:
    """Plain data with None for numbers that JSON does not have."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content


def plain_digest(content: Any) -> str:
    """SHA-256 of plain data, which does not depend on the order of names and survives a round trip through JSON."""
    written_and_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(written_and_read, sort_keys=True).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = repeated(name for name, _ in pairs)
        raise ValueError(f"it gives {first_few(map(repr, sorted(twice)), ', ')} twice")
    return entries
