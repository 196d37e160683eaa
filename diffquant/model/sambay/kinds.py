"""The kinds of layers of a SambaY model, and which layer is which."""

from typing import Literal

# Mamba-1; attention over a window; the one full attention; a gate on the memory that the last Mamba layer leaves;
# attention of a layer's own queries over the full attention's keys and values.
Kind = Literal["mamba", "windowed attention", "full attention", "gated memory", "cross attention"]


def kind_of(layer: int, layers: int) -> Kind:
    """Kind of a 0-based layer among so many, a multiple of four."""
    memory, full = layers // 2, layers // 2 + 1
    if layer % 2 == 0:
        return "mamba" if layer <= memory else "gated memory"
    if layer == full:
        return "full attention"
    return "windowed attention" if layer < full else "cross attention"


def kinds_of(layers: int) -> list[Kind]:
    """Kind of each layer."""
    return [kind_of(layer, layers) for layer in range(layers)]


def layers_of_targets(layers: int) -> dict[str, list[int]]:
    """Numbers of the layers that have logits and operands, and of those with keys and values of their own."""
    attention = [layer for layer, kind in enumerate(kinds_of(layers)) if kind.endswith("attention")]
    stored = [layer for layer in attention if kind_of(layer, layers) != "cross attention"]
    return {"k": stored, "v": stored, "logits": attention, "qk": attention}
