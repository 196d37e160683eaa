"""Attention over latents as the op's: one row of a token is every head's key, and with its first channels the value.

Queries go into the latent's space, and what attention gives comes out of it, by the matrix that would expand latents to
keys and values. A cache keeps a latent as a key, beside the channels that turn, and as a value as wide.
"""

from dataclasses import replace

from diffquant.family.spec import DiffSpec
from diffquant.model.architecture import Architecture
from diffquant.model.motif3.architecture import Motif3Architecture

# Is multiplied by a head at a time, and from both sides: codes run along one of its axes.
EXPANSION = ".self_attn.wkv_b.weight"
# Is as large as the other matrices of attention, and no recipe's weights include it.
OUTPUT_GATE = ".self_attn.wq_b_gate.weight"


def latent_widths(architecture: Architecture) -> tuple[int, int] | None:
    """Channels of a token's latent and, behind it, of the key that turn; None for a model without latents."""
    if not isinstance(architecture, Motif3Architecture):
        return None
    return architecture.kv_lora_rank, architecture.qk_rope_head_dim


def op_spec(architecture: Architecture) -> DiffSpec:
    """The specification of the attention that the graph's nodes compute: the model's own, or that over latents.

    The scale of the latter's logits remains the model's.
    """
    spec, widths = architecture.diff_spec, latent_widths(architecture)
    if widths is None:
        return spec
    row = sum(widths)
    return replace(spec, kv_pairs=1, head_dim=row, value_dim=row, rope="none", output_gate=False)
