"""Model cards: the README.md of a checkpoint that was quantized or converted."""

from collections.abc import Mapping

from diffquant.quantization.plan import QuantizationPlan
from diffquant.scheme import Scheme

_HEAD = """---
library_name: transformers
tags:
- diffquant
- differential-transformer
{tags}---
"""


def quantized_card(plan: QuantizationPlan, errors: Mapping[str, float]) -> str:
    """Model card of a quantized checkpoint: what was quantized, how, and how to load it.

    Args:
        errors: relative RMS error of each packed weight, by name.
    """
    name = plan.checkpoint.name
    recipe = plan.recipe
    lines = [
        _HEAD.format(tags="- compressed-tensors\n" if plan.schemes else ""),
        f"# {name}, quantized\n",
        f"Made from `{name}` ({plan.checkpoint.config.get('model_type')}) by diffquant, after training.\n",
        "| target | scheme |",
        "|---|---|",
        f"| weights | {recipe.weights} |",
        f"| K cache | {recipe.k} |",
        f"| V cache | {recipe.v} |",
        f"| attention logits | {recipe.logits} |",
        *(f"| `{pattern}` | {scheme} |" for pattern, scheme in recipe.overrides.items()),
        "",
        f"Tensors take {plan.size}.",
    ]
    if plan.schemes:
        lines.append(_weights_paragraph(plan, errors))
    lines.append("`diffquant.load(path)` gives the model with all of the recipe applied. diffquant.json has each")
    lines.append("tensor's bits, error and size.\n")
    return "\n".join(lines)


def converted_card(name: str, source_type: str, target_type: str, what: str) -> str:
    """Model card of a converted checkpoint, which says what it comes from."""
    return "\n".join(
        [
            _HEAD.format(tags=""),
            f"# {name}, as {target_type}\n",
            f"Converted from `{name}` ({source_type}) by diffquant. {what}\n",
        ]
    )


def _weights_paragraph(plan: QuantizationPlan, errors: Mapping[str, float]) -> str:
    by_scheme: dict[Scheme, list[float]] = {}
    for tensor in plan.tensors:
        if tensor.scheme.quantizes:
            by_scheme.setdefault(tensor.scheme, []).append(errors[tensor.name])
    parts = [f"{len(e)} weights at {scheme} ({sum(e) / len(e):.2%} mean error)" for scheme, e in by_scheme.items()]
    return (
        f"Packed: {', '.join(parts)}; {plan.packed_bits:.2f} stored bits a weight, scales included; rounding: "
        f"{plan.recipe.rounding.name}. The format is compressed-tensors' pack-quantized, which transformers loads by "
        "itself; what that format cannot say (cache and logits) stands in config.json under `diffquant_config`.\n"
    )
