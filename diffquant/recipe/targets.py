"""The targets of a recipe, and the schemes that each supports."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from diffquant.errors import UsageError
from diffquant.recipe.numbers.formats import FORMATS
from diffquant.recipe.scheme import Scheme

LAYER_TARGETS = ("k", "v", "logits", "qk", "p", "pv")
# Targets that `to_dict` leaves out at 16 bits, so that older cells and folders keep the same form.
UNSAID = ("qk", "p", "pv", "activations")
TARGETS = ("weights", *LAYER_TARGETS, "activations")
# Targets that can be calibrated, and whose widths `search` can choose.
CALIBRATED_TARGETS = ("k", "v", "logits")
# Groups of 128 are common, but do not divide every width in use (576 in SmolLM2-135M). Groups of 32 do, and gain
# more at 4 bits than the half bit for their scales costs.
DEFAULT_GRANULARITY = {**dict.fromkeys(LAYER_TARGETS, "row"), "weights": "g32", "pv": "column", "activations": "row"}
# Formats that compressed-tensors has for activations, rounded as in `diffquant.model.inputs`.
_OF_ACTIVATIONS = (*map(str, range(2, 9)), "e4m3", "nvfp4")


def target_of(pattern: str) -> str:
    """Return the target that an override's pattern sets.

    This is the part after the last dot if that is a target's name, else "weights".
    """
    last = pattern.rsplit(".", 1)[-1]
    return last if last in TARGETS else "weights"


def layer_target_name(target: str, layer: int) -> str:
    """Return a layer's name for a target, which patterns of overrides have to match.

    For example, it is "model.layers.3.self_attn.k" for target "k" and layer 3.
    """
    return f"model.layers.{layer}.self_attn.{target}"


def check_layer_overrides(patterns: Iterable[str], layers: Mapping[str, Sequence[int]]) -> None:
    """Check that every pattern for one of `LAYER_TARGETS` matches a layer of a model.

    Args:
        patterns: patterns of a recipe's overrides.
        layers: 0-based indices of the layers that have each target, by target.

    Raises:
        UsageError: patterns match no layer; the message lists all of them.
    """
    names = [layer_target_name(target, layer) for target in LAYER_TARGETS for layer in layers[target]]
    of_layers = [pattern for pattern in patterns if target_of(pattern) in LAYER_TARGETS]
    unmatched = [pattern for pattern in of_layers if not any(fnmatchcase(name, pattern) for name in names)]
    if unmatched:
        raise UsageError(
            f"overrides {', '.join(map(repr, unmatched))} match no layer; the model has {names[0]} to {names[-1]}"
        )


def parse_overrides(overrides: Mapping[str, str]) -> dict[str, Scheme]:
    """Parse overrides, given as a mapping from name patterns to schemes as text.

    The target of a pattern (see `target_of`) decides which schemes are allowed, and their default granularity.

    Raises:
        UsageError: this is not such a mapping, or a scheme is malformed.
    """
    if not isinstance(overrides, Mapping):
        raise UsageError(f"overrides must map name patterns to schemes, got {overrides!r}")
    unnamed = [pattern for pattern in overrides if not isinstance(pattern, str)]
    if unnamed:
        raise UsageError(f"overrides must map name patterns to schemes; {unnamed[0]!r} is not a pattern")
    return {name: parse_target_scheme(target_of(name), text, f"override {name!r}") for name, text in overrides.items()}


def parse_target_scheme(target: str, text: str | int, what: str | None = None) -> Scheme:
    """Parse the scheme of a target, which has the target's default granularity if the text has none.

    Args:
        what: words that the message of an error begins with; by default the target.

    Raises:
        UsageError: the text is not a scheme of this target.
    """
    try:
        return Scheme.parse(text, DEFAULT_GRANULARITY[target], target)
    except UsageError as error:
        raise UsageError(f"{what or target}: {error}") from error


def refusal(target: str, scheme: Scheme, what: str | None = None) -> str | None:
    """Explain why a target does not support a scheme, or return None if it does.

    Args:
        what: words that the explanation begins with; by default the target.
    """
    what = what or target
    if scheme.quantizes and (reason := scheme.sharing.refusal(target)):
        return f"{what} {reason}"
    if scheme.sharing.block_size and target == "weights" and not scheme.format.has_tiles:
        able = " and ".join(f"{name}:{scheme.sharing}" for name, each in FORMATS.items() if each.has_tiles)
        return f"{what}: {scheme.format.name} cannot have one scale per block of a weight; {able} can"
    if scheme.format.for_weights_only and target != "weights":
        return f"{what}: {scheme.format.name} is for weights only; use an integer format, such as 4"
    if scheme.format.fits_errors and target == "logits":
        return (
            f"{what}: {scheme.format.name} chooses scales by rounding error, but logits are scaled by their "
            f"largest magnitude; use nvfp4"
        )
    if target == "activations" and scheme.quantizes and scheme.format.name not in _OF_ACTIVATIONS:
        return f"{what}: engines round activations to {', '.join(_OF_ACTIVATIONS)}, not to {scheme.format.name}"
    reasons = [reason for each in scheme.transforms if (reason := each.refusal(target))]
    return f"{what}: {reasons[0]}" if reasons else None
