"""The file web.json, which tells a web page how to run an exported folder and to compute its attention maps."""

from typing import Any

from diffquant.model.config import DiffTransformerConfig
from diffquant.text.special_tokens import SpecialTokens

FILE = "web.json"


def web_description(config: DiffTransformerConfig, tokens: SpecialTokens) -> dict[str, Any]:
    """The model by the words of docs/differential-attention-op.md."""
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
