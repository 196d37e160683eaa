"""Targets of a recipe, by name, and the schemes that each may have."""

from collections.abc import Mapping

from diffquant.errors import UsageError
from diffquant.recipe.numbers.formats import FORMATS
from diffquant.recipe.scheme import Scheme

LAYER_TARGETS = ("k", "v", "logits", "qk", "p", "pv")
# Those that a recipe's plain form leaves out where they stay at 16 bits: cells and folders of before have one form.
UNSAID = ("qk", "p", "pv", "activations")
TARGETS = ("weights", *LAYER_TARGETS, "activations")
# Those that can be calibrated, and that a search chooses the widths of.
CALIBRATED_TARGETS = ("k", "v", "logits")
# Groups of 128 are the custom, but do not divide every width in use (576 in SmolLM2-135M); 32 do, and
# gain more at 4 bits than their half bit of scales costs.
DEFAULT_GRANULARITY = {**dict.fromkeys(LAYER_TARGETS, "row"), "weights": "g32", "pv": "column", "activations": "row"}
# Formats that compressed-tensors has for activations, rounded as `diffquant.model.inputs` rounds them.
_OF_ACTIVATIONS = (*map(str, range(2, 9)), "e4m3", "nvfp4")


def target_of(pattern: str) -> str:
    """Return the target of an override: the one that its last part names, else "weights"."""
    last = pattern.rsplit(".", 1)[-1]
    return last if last in TARGETS else "weights"


def layer_name(target: str, layer: int) -> str:
    """Name of a layer's cache, logits or operands, which patterns of overrides are matched with."""
    return f"model.layers.{layer}.self_attn.{target}"


def parse_overrides(overrides: Mapping[str, str]) -> dict[str, Scheme]:
    """Schemes by pattern, each read as its target has it."""
    if not isinstance(overrides, Mapping):
        raise UsageError(f"overrides must map name patterns to schemes, got {overrides!r}")
    unnamed = [pattern for pattern in overrides if not isinstance(pattern, str)]
    if unnamed:
        raise UsageError(f"overrides must map name patterns to schemes; {unnamed[0]!r} is not a pattern")
    return {name: parse_for(target_of(name), text, f"override {name!r}") for name, text in overrides.items()}


def parse_for(target: str, text: str | int, what: str | None = None) -> Scheme:
    """Read a scheme, by default with its target's granularity; errors begin with `what` it is for."""
    try:
        return Scheme.parse(text, DEFAULT_GRANULARITY[target], target)
    except UsageError as error:
        raise UsageError(f"{what or target}: {error}") from error


def refusal(target: str, scheme: Scheme, what: str | None = None) -> str | None:
    """Explain why a target cannot have a scheme, or return None if it can; `what` names the target in the reason."""
    what = what or target
    if scheme.quantizes and (reason := scheme.sharing.refusal(target)):
        return f"{what} {reason}"
    if scheme.sharing.tile and target == "weights" and not scheme.format.has_tiles:
        able = " and ".join(f"{name}:{scheme.sharing}" for name, each in FORMATS.items() if each.has_tiles)
        return f"{what}: {scheme.format.name} is not stored in blocks of a weight, which {able} are"
    if scheme.format.fits_errors and target == "logits":
        return (
            f"{what}: {scheme.format.name} chooses scales by the errors they leave, and logits are rounded by their "
            f"largest magnitudes; use nvfp4"
        )
    if target == "activations" and scheme.quantizes and scheme.format.name not in _OF_ACTIVATIONS:
        return f"{what}: engines round activations to {', '.join(_OF_ACTIVATIONS)}, not to {scheme.format.name}"
    reasons = [reason for each in scheme.transforms if (reason := each.refusal(target))]
    return f"{what}: {reasons[0]}" if reasons else None
