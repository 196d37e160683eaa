"""Checkpoints of every member of the family, of sizes that vLLM's kernels for processors take."""

from pathlib import Path
from typing import Any

from tests.support.checkpoints import MOTIF, NATIVE, UNILM, write_checkpoint

FAMILY = ["diffllama", *UNILM, *MOTIF, *NATIVE]
# Models that were trained, since low bits say little of random ones.
KINDS = ("prose-diff-v1", "prose-diff-v2")
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 320, "max_position_embeddings": 256}
_HEADS = {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
_GATED = {"pairs": 4, "kv_pairs": 2, "head_dim": 32, "value_dim": 32, "shared_k": True, "lam": "two-gates"}
_CHANGES: dict[str, dict[str, Any]] = {
    # Its heads make up the width.
    "motif": _HEADS | {"hidden_size": 256},
    "motif-grouped": _HEADS | {"num_attention_heads": 10, "num_noise_heads": 2},
    "gated": {"spec": _GATED | {"signals_per_noise": 2, "output_gate": True}},
}


def write_served(folder: Path, source: str, **changes: Any) -> Path:
    """A random checkpoint of one of `FAMILY`, whose maps differ and whose gates are open by half and less."""
    return write_checkpoint(folder, source, **(_SIZES | _CHANGES.get(source, _HEADS) | changes))
