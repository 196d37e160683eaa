"""Data that JSON holds."""

import hashlib
import json
from typing import Any

# An object whose values JSON can write, and whose reader knows what stands in it.
JsonObject = dict[str, Any]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, and refuse what a parser would choose among or fall over.

    Raises:
        ValueError: the text is no JSON, gives a name twice in one object, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain_digest(content: Any) -> str:
    """SHA-256 of plain data, in whatever order its objects give their names; what JSON writes and reads keeps it."""
    written_and_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(written_and_read, sort_keys=True).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"it gives {', '.join(map(repr, twice))} twice")
    return entries
