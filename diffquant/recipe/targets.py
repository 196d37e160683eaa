"""Targets of a recipe, by name, and the schemes that each may have."""

from collections.abc import Mapping

from diffquant.errors import UsageError
from diffquant.numbers.formats import FORMATS
from diffquant.scheme import Scheme

LAYER_TARGETS = ("k", "v", "logits", "qk", "p", "pv")
# Those that a recipe's plain form leaves out where they stay at 16 bits: cells and folders of before have one form.
UNSAID = ("qk", "p", "pv")
TARGETS = ("weights", *LAYER_TARGETS)
# Those that can be calibrated, and that a search chooses the widths of.
CALIBRATED_TARGETS = ("k", "v", "logits")
# Groups of 128 are the custom, but do not divide every width in use (576 in SmolLM2-135M); 32 do, and
# gain more at 4 bits than their half bit of scales costs.
DEFAULT_GRANULARITY = {
    "weights": "g32",
    "k": "row",
    "v": "row",
    "logits": "row",
    "qk": "row",
    "p": "row",
    "pv": "column",
}


def target_of(pattern: str) -> str:
    """The target of an override: one of `LAYER_TARGETS` where its last part says so, else "weights"."""
    last = pattern.rsplit(".", 1)[-1]
    return last if last in LAYER_TARGETS else "weights"


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
    return {pattern: parse_for(target_of(pattern), text) for pattern, text in overrides.items()}


def parse_for(target: str, text: str | int) -> Scheme:
    """A scheme's text, with the granularity of its target where it names none."""
    return Scheme.parse(text, DEFAULT_GRANULARITY[target], target)


def check_allowed(target: str, scheme: Scheme, what: str | None = None) -> None:
    """Refuse a scheme that its target cannot have; `what` is what the error calls it, the target by default."""
    what = what or target
    if scheme.quantizes and (refusal := scheme.sharing.refusal(target)):
        raise UsageError(f"{what} {refusal}")
    if scheme.sharing.tile and target == "weights" and not scheme.format.has_tiles:
        able = " and ".join(f"{name}:{scheme.sharing}" for name, each in FORMATS.items() if each.has_tiles)
        raise UsageError(f"{what}: {scheme.format.name} is not stored in blocks of a weight, which {able} are")
    if scheme.format.fits_errors and target == "logits":
        raise UsageError(
            f"{what}: {scheme.format.name} chooses scales by the errors they leave, and logits are rounded by their "
            f"largest magnitudes; use nvfp4"
        )
    if scheme.shift and target != "logits":
        raise UsageError(f"{what}: shift is for logits, which softmax sees only up to a constant a row")
    if scheme.alike and target != "logits":
        raise UsageError(f"{what}: alike is only for logits, which have two maps to share a scale")
    if scheme.rotated and target not in ("k", "v", "qk"):
        raise UsageError(f"{what}: rotated is for k and v, the cache's keys and values, and for qk; leave it out")
    if scheme.rotated and scheme.sharing.is_static:
        raise UsageError(f"{what}: static scales are of channels as they are; leave out rotated")
    if (scheme.smooth or scheme.smoothq) and target != "qk":
        flag = "smooth" if scheme.smooth else "smoothq"
        raise UsageError(f"{what}: {flag} is for qk, which may lose its means before Q·Kᵀ; leave it out")
    if (scheme.pow2 or scheme.fullsum) and target != "p":
        flag = "pow2" if scheme.pow2 else "fullsum"
        raise UsageError(f"{what}: {flag} is for p, softmax weights with a scale and a sum of their own; leave it out")
    if scheme.pow2 and scheme.granularity != "row":
        raise UsageError(f"{what}: pow2 is for one scale a row, which is known beforehand; leave it out")
    if scheme.shift and scheme.sharing.is_static:
        raise UsageError(f"{what}: static scales are of logits as they are; leave out shift")
