"""Checkpoints of every member of the family, of sizes that vLLM's kernels for processors take."""

from pathlib import Path
from typing import Any

from tests.support.checkpoints import MOTIF, NATIVE, UNILM, write_checkpoint

FAMILY = ["diffllama", *UNILM, *MOTIF, *NATIVE]
# Those whose decoders are diffquant's own, and what vLLM is asked for to serve them.
OWN: dict[str, dict[str, Any]] = {
    "phi4flash": {},
    "motif3": {"attention_backend": "CPU_MLA", "enable_prefix_caching": False, "enable_chunked_prefill": False},
}
# Models that were trained, since low bits say little of random ones.
KINDS = ("prose-diff-v1", "prose-diff-v2")
_SIZES = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 320, "max_position_embeddings": 256}
_HEADS = {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
_GATED = {"pairs": 4, "kv_pairs": 2, "head_dim": 32, "value_dim": 32, "shared_k": True, "lam": "two-gates"}
_LATENTS = {"head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 32, "kv_lora_rank": 512}
_CHANGES: dict[str, dict[str, Any]] = {
    # Its heads make up the width.
    "motif": _HEADS | {"hidden_size": 256},
    "motif-grouped": _HEADS | {"num_attention_heads": 10, "num_noise_heads": 2},
    "gated": {"spec": _GATED | {"signals_per_noise": 2, "output_gate": True}},
    "phi4flash": {"mamba_d_state": 16, "mamba_d_conv": 4, "sliding_window": 24},
    # vLLM has a kernel for latents of this width alone on processors.
    "motif3": _LATENTS | {"sliding_window": 24, "moe_intermediate_size": 64, "original_seq_len": 64},
}


def write_served(folder: Path, source: str, **changes: Any) -> Path:
    """A random checkpoint of one of `FAMILY` or `OWN`, whose maps differ and whose gates are open by half and less."""
    return write_checkpoint(folder, source, **(_SIZES | _CHANGES.get(source, _HEADS) | changes))
