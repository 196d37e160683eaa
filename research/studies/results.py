"""Committed results read back."""

import json
from pathlib import Path
from typing import Any

from diffquant.support.files import read_text_or_xz


def read_json(file: Path) -> Any:
    """A result as plain data, from FILE or FILE.xz."""
    return json.loads(read_text_or_xz(file))
