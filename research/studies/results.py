"""Committed results read back as the objects that wrote them, to be drawn or compared again."""

import json
from pathlib import Path
from typing import Any

from diffquant.calib.analysis.attention_map import AttentionMaps, ModelAttention, Place
from diffquant.support.xz import read_text


def read_json(file: Path) -> Any:
    """A result as plain data, from FILE or FILE.xz."""
    return json.loads(read_text(file))


def read_attention_maps(file: Path) -> AttentionMaps:
    """The attention maps in an attention-map.json."""
    data = read_json(file)
    models = [
        ModelAttention(**model | {"places": [Place(**place) for place in model["places"]]}) for model in data["models"]
    ]
    return AttentionMaps(models, data["settings"])
