"""Writes web.json, which tells a web page how to run an exported folder and to compute its attention maps."""

import json
from pathlib import Path
from typing import Any

from diffquant.model.config import DiffTransformerConfig
from diffquant.support.files import write_atomically
from diffquant.text.special_tokens import SpecialTokens

FILE = "web.json"


def write_web_description(folder: Path, config: DiffTransformerConfig, tokens: SpecialTokens) -> None:
    """Describe the model by the words of docs/differential-attention-op.md."""
    write_atomically(folder / FILE, json.dumps(_entry(config, tokens), indent=2) + "\n")


def _entry(config: DiffTransformerConfig, tokens: SpecialTokens) -> dict[str, Any]:
    spec = config.diff_spec
    return {
        "generation": spec.generation,
        "layers": config.num_hidden_layers,
        "num_pairs": spec.pairs,
        "num_kv_pairs": spec.kv_pairs,
        "signals_per_noise": spec.signals_per_noise,
        "head_dim": spec.head_dim,
        "shares_keys": spec.shared_k,
        "scale": spec.scale,
        "context": config.max_position_embeddings,
        "ends": tokens.ends,
    }
