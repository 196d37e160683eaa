"""Data that JSON holds."""

from typing import Any

# An object whose values JSON can write, and whose reader knows what stands in it.
JsonObject = dict[str, Any]
