"""A `Recipe` says how a whole model is quantized: a scheme for each kind of tensor, overrides by name, and a rounding.

It needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.scheme import FULL, Scheme
from diffquant.support.suggestion import did_you_mean
from diffquant.support.version import CONFIG_VERSION

LAYER_TARGETS = ("k", "v", "logits", "qk", "p", "pv")
# Those that a recipe's plain form leaves out where they stay at 16 bits: cells and folders of before have one form.
_UNSAID = ("qk", "p", "pv")
_TARGETS = ("weights", *LAYER_TARGETS)
# Those that can be calibrated, and that a search chooses the widths of.
CALIBRATED_TARGETS = ("k", "v", "logits")
# What a rounding that compensates may be told, and the choices; the first is what it does by itself.
ROUNDING_OPTIONS = {"inputs": ("rounded", "unrounded"), "target": ("model", "layer"), "order": ("stored", "activation")}
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

# Arguments of `Recipe.of` by the field's own names; 4-bit weights beside 16-bit activations are known as w4a16 too.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"weights": "4:g32"},
    "int8": {"weights": "8:row", "kv": "8"},
    # The least KL of the caches of research/pages/kv.md that take at most 0.3 of 16 bits in a long context.
    "kv-4bit-best": {"k": "4:c32", "v": "4:row:rotated", "residual": 64},
    "paper": {"logits": "4:tensor"},
}
# Operands of attention as published kernels round them, also arguments of `Recipe.of`, beside any of the above. What
# all leave out: kernels round P while a row's largest logit is that of the keys read so far, and accumulate in formats
# of their own; here it is the row's own, and sums are exact.
LIKE: Mapping[str, Mapping[str, Any]] = {
    # SageAttention 2 as released (qk_int8_pv_fp8, per thread). Its V scale of 2.25 for half-precision sums is not here.
    "sage2": {"qk": "8:thread:smooth", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # The same paper's INT4, arXiv 2411.10958, whose queries lose their mean too.
    "sage2-int4": {"qk": "4:thread:smooth:smoothq", "p": "e4m3:row:fullsum", "pv": "e4m3:channel"},
    # SageAttention 3, arXiv 2505.11594: scales of P under 1/(448·6), those of Q, K and V under none. The kernel divides
    # P by scales before they become e4m3; here it is by what they became, as the formula has it for Q, K and V.
    "sage3": {"qk": "nvfp4:smooth:smoothq", "p": "nvfp4:fullsum", "pv": "nvfp4"},
    # FlashAttention-3, arXiv 2407.08608, section 3.3: blocks, and Q and K rotated. The released kernel instead takes a
    # scale a sequence and KV head from its caller, and does not rotate; both place P's largest at 2^8.
    "fa3-fp8": {"qk": "e4m3:b128:rotated", "p": "e4m3:row:pow2:fullsum", "pv": "e4m3:b128"},
    # ModelOpt's q, k, p and v_bmm_quantizer in NVFP4: P under 1/(448·6), K and V under none. A dynamic Q has a scale of
    # its tensor above its blocks', which is left out here: it only matters where block scales leave e4m3's range.
    "modelopt-nvfp4": {"qk": "nvfp4", "p": "nvfp4:fullsum", "pv": "nvfp4"},
}


@dataclass(frozen=True)
class RoundingSettings:
    """A recipe's choice of rounding: which rule finds the weights' codes and scales, and what that rule reads.

    Attributes:
        name: name of a registered rounding, see `quantization.roundings`; known names are checked with the checkpoint.
        text: text file that a rounding with `needs_text` reads, relative to the working directory; the prose that
            ships by default.
        tokens: number of tokens of the text that are read; the rule's own number by default.
        window: number of tokens that the model sees at once while it reads; the rule's own number by default.
        inputs: inputs that a layer's weights are rounded for: "rounded", those that it has once the layers before it
            are rounded, or "unrounded", those of the 16-bit model.
        target: output that a layer's weights are to keep: "model", the 16-bit model's, so that they also make up for
            what was lost before them (GPTAQ, arXiv 2504.02692), or "layer", the layer's own for the inputs it has.
        order: order in which a weight's columns are rounded: "stored", or "activation", those of the largest inputs
            first, with scales that are chosen before.
    """

    name: str = "nearest"
    text: Path | None = None
    tokens: int | None = None
    window: int | None = None
    inputs: str | None = None
    target: str | None = None
    order: str | None = None

    def __post_init__(self) -> None:
        for what, number in (("tokens", self.tokens), ("window", self.window)):
            if number is not None and (type(number) is not int or number < 2):
                raise UsageError(f"rounding: {what} must be a number of 2 or more, got {number!r}")
        for what, choice in self.options.items():
            if choice not in ROUNDING_OPTIONS[what]:
                raise UsageError(f"rounding: {what} must be {' or '.join(ROUNDING_OPTIONS[what])}, got {choice!r}")
        if (self.inputs, self.target) == ("unrounded", "model"):
            raise UsageError(
                "rounding: on unrounded inputs a layer's output is the model's; leave out inputs, or target"
            )

    @classmethod
    def parse(cls, entry: "str | Mapping[str, Any]") -> "RoundingSettings":
        """Read a recipe's entry: a rounding's name, or a mapping with its name, text, tokens, window and options.

        Raises:
            UsageError: a key is unknown (the nearest known one is named), or a value has the wrong type.
        """
        if isinstance(entry, str):
            return cls(entry)
        known = [f.name for f in fields(cls)]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise UsageError(f"rounding must be a name or a mapping of {', '.join(known)}, got {entry!r}")
        unknown = [str(key) for key in entry if key not in known]
        if unknown:
            raise UsageError("; ".join(f"unknown rounding key {key!r}{did_you_mean(key, known)}" for key in unknown))
        text = entry.get("text")
        if text is not None and not isinstance(text, str):
            raise UsageError(f"rounding: text must be the name of a file, got {text!r}")
        return cls(**{**entry, "text": None if text is None else Path(text)})

    @property
    def options(self) -> dict[str, str]:
        """The options that are given, by name."""
        return {name: given for name in ROUNDING_OPTIONS if (given := getattr(self, name)) is not None}

    @property
    def reads(self) -> bool:
        """Whether the recipe names a text, or says how much of it is read."""
        return (self.text, self.tokens, self.window) != (None, None, None)

    def to_plain(self) -> str | dict[str, Any]:
        """Plain data that `parse` reads: the name where nothing else is stated."""
        if not self.reads and not self.options:
            return self.name
        entries = {
            "name": self.name,
            "text": None if self.text is None else str(self.text),
            "tokens": self.tokens,
            "window": self.window,
            **self.options,
        }
        return {key: value for key, value in entries.items() if value is not None}


NEAREST = RoundingSettings()


@dataclass(frozen=True, repr=False)
class Recipe:
    """What is quantized in a model, and how. Every target defaults to 16 bits.

    Most recipes are made of texts, by `Recipe.of` or by a verb that is given them:

        >>> Recipe.of(weights="4:g32", kv=8)
        Recipe.of(weights='4:g32', kv='8:row')

    Attributes:
        weights: scheme of the linear layers' weights.
        k, v: schemes of the KV cache.
        logits: scheme of Q·Kᵀ·scale of each map, before softmax (simulated).
        qk: scheme of the queries and keys that Q·Kᵀ is computed of (simulated).
        p: scheme of each map's softmax weights before they are divided by their row's sum (simulated).
        pv: scheme of the values that the weights are multiplied with, beside that of the cache (simulated).
        residual: number of newest tokens of the cache that stay 16-bit.
        overrides: schemes by name pattern (shell wildcards); the first match wins. A pattern names modules whose
            weight it is about, or where it ends in ".k", ".v", ".logits", ".qk", ".p" or ".pv" the cache,
            logits or operands of a layer: "model.layers.3.self_attn.k".
        rounding: rule by which weights become codes and scales.
    """

    weights: Scheme = FULL
    k: Scheme = FULL
    v: Scheme = FULL
    logits: Scheme = FULL
    qk: Scheme = FULL
    p: Scheme = FULL
    pv: Scheme = FULL
    residual: int = 0
    overrides: Mapping[str, Scheme] = field(default_factory=dict)
    rounding: RoundingSettings = NEAREST

    def __post_init__(self) -> None:
        for target in _TARGETS:
            _check_allowed(target, getattr(self, target))
        for pattern, scheme in self.overrides.items():
            _check_allowed(target_of(pattern), scheme, f"override {pattern!r}")
        if self.residual < 0:
            raise UsageError(f"residual must be 0 or more tokens, got {self.residual}")

    @classmethod
    def of(
        cls,
        weights: str | int = 16,
        kv: str | int = 16,
        k: str | int | None = None,
        v: str | int | None = None,
        logits: str | int = 16,
        residual: int = 0,
        overrides: Mapping[str, str] | None = None,
        rounding: str | Mapping[str, Any] = NEAREST.name,
        qk: str | int = 16,
        p: str | int = 16,
        pv: str | int = 16,
    ) -> "Recipe":
        """A recipe from scheme texts; `kv` serves whichever of `k` and `v` is not given.

        Args:
            rounding: a rounding's name, or a mapping as `RoundingSettings.parse` reads it.
        """
        return cls(
            weights=_parse_for("weights", weights),
            k=_parse_for("k", kv if k is None else k),
            v=_parse_for("v", kv if v is None else v),
            logits=_parse_for("logits", logits),
            qk=_parse_for("qk", qk),
            p=_parse_for("p", p),
            pv=_parse_for("pv", pv),
            residual=residual,
            overrides=_parse_overrides(overrides or {}),
            rounding=RoundingSettings.parse(rounding),
        )

    @classmethod
    def parse(cls, given: "RecipeLike") -> "Recipe":
        """A recipe from what people write: a scheme of the weights, entries by name, or a YAML file.

        Args:
            given: a recipe; a scheme of the weights such as "4:g32" or 8; a mapping such as
                {"weights": "4:g32", "kv": 8}, as `from_dict` reads it; or the `Path` of a YAML file.

        Raises:
            UsageError: it is none of these, or cannot be read.
        """
        if isinstance(given, Recipe):
            return given
        if isinstance(given, str | int):
            return cls.of(weights=given)
        if isinstance(given, Path):
            return cls.read(given)
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        raise UsageError(
            f"a recipe is a scheme of the weights such as '4:g32', a mapping such as {{'weights': '4:g32', 'kv': 8}}, "
            f"the Path of a YAML file or a Recipe; got {given!r}"
        )

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> "Recipe":
        """Inverse of `to_dict`; `kv` serves whichever of `k` and `v` is not given.

        Raises:
            UsageError: a key is unknown (the nearest known one is named), or a scheme is malformed.
        """
        known = [*(f.name for f in fields(cls)), "kv"]
        unknown = [key for key in entries if key not in known]
        if unknown:
            raise UsageError("; ".join(f"unknown recipe key {key!r}{did_you_mean(str(key), known)}" for key in unknown))
        overrides = entries.get("overrides") or {}
        residual = entries.get("residual", 0)
        if not isinstance(overrides, Mapping):
            raise UsageError(f"overrides must map name patterns to schemes, got {overrides!r}")
        if type(residual) is not int:
            raise UsageError(f"residual must be a number of tokens, got {residual!r}")
        if "kv" in entries:
            entries = {"k": entries["kv"], "v": entries["kv"], **entries}
        schemes = {target: _parse_for(target, entries[target]) for target in _TARGETS if target in entries}
        rounding = RoundingSettings.parse(entries.get("rounding", NEAREST.name))
        return cls(**schemes, residual=residual, overrides=_parse_overrides(overrides), rounding=rounding)

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Read a recipe from a YAML file."""
        # Here, since a recipe of options is made without the time that importing yaml takes.
        from diffquant.support.yaml_text import parse_yaml

        try:
            entries = parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read recipe {path}: {error}") from error
        if not isinstance(entries, dict):
            raise UsageError(f"recipe {path} must be a mapping of {', '.join(f.name for f in fields(cls))}")
        try:
            return cls.from_dict(entries)
        except UsageError as error:
            raise UsageError(f"recipe {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data: scheme texts, the residual and the overrides; operands and rounding where they are not plain."""
        schemes = {target: getattr(self, target) for target in _TARGETS}
        stated = {target: str(s) for target, s in schemes.items() if s.quantizes or target not in _UNSAID}
        rounding = {} if self.rounding == NEAREST else {"rounding": self.rounding.to_plain()}
        return {
            **stated,
            "residual": self.residual,
            "overrides": {pattern: str(scheme) for pattern, scheme in self.overrides.items()},
            **rounding,
        }

    def to_config(self) -> dict[str, Any]:
        """The content of `diffquant_config` in the config.json of a checkpoint under this recipe."""
        return {"version": CONFIG_VERSION, "recipe": self.to_dict()}

    def __repr__(self) -> str:
        """An expression that makes the recipe, without what is at its default."""
        entries, defaults = self.to_dict(), Recipe().to_dict()
        if entries["k"] == entries["v"]:
            entries = {"weights": entries["weights"], "kv": entries.pop("k"), **entries, "v": defaults["v"]}
            defaults["kv"] = defaults["k"]
        stated = {name: value for name, value in entries.items() if value != defaults.get(name)}
        return f"Recipe.of({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def weight_scheme(self, module: str, by_default: bool = True) -> Scheme:
        """Scheme of a module's weight.

        Args:
            module: full name without ".weight".
            by_default: whether `weights` applies to it when no override does (embeddings, λ
                projections and the head stay 16-bit unless an override names them).
        """
        for pattern, scheme in self.weight_overrides.items():
            if fnmatchcase(module, pattern):
                return scheme
        return self.weights if by_default else FULL

    @property
    def weight_overrides(self) -> dict[str, Scheme]:
        return {pattern: scheme for pattern, scheme in self.overrides.items() if target_of(pattern) == "weights"}

    def at_layer(self, layer: int) -> "Recipe":
        """This recipe with the schemes of one layer's `LAYER_TARGETS`, overrides applied."""
        of_layer = {target: self._scheme_at(target, layer) for target in LAYER_TARGETS}
        return replace(self, **of_layer, overrides=self.weight_overrides)  # type: ignore[arg-type]

    def schemes_of(self, target: str) -> set[Scheme]:
        """Every scheme that some layer may have for one of `LAYER_TARGETS`."""
        return {getattr(self, target)} | {s for pattern, s in self.overrides.items() if target_of(pattern) == target}

    @property
    def schemes(self) -> set[Scheme]:
        """Every scheme of some tensor."""
        return {*(getattr(self, target) for target in _TARGETS), *self.overrides.values()}

    @property
    def rounds_maps(self) -> set[bool]:
        """Whether layers round their maps, by logits or by softmax weights: as backends must be able to."""
        logits, weights = ({s.quantizes for s in self.schemes_of(target)} for target in ("logits", "p"))
        return {a or b for a in logits for b in weights}

    @property
    def rotates_cache(self) -> bool:
        """Whether some layer's keys or values are rotated before they are rounded."""
        return any(scheme.rotated for target in ("k", "v") for scheme in self.schemes_of(target))

    def is_static(self, target: str) -> bool:
        """Whether some layer's "k", "v" or "logits" takes calibrated scales."""
        return any(scheme.sharing.is_static for scheme in self.schemes_of(target))

    def check_layers(self, layers: Mapping[str, Sequence[int]]) -> None:
        """Check that every override of a cache or of logits is about some layer.

        Args:
            layers: numbers of the layers that have each target.

        Raises:
            UsageError: some match no layer; they are named.
        """
        names = [_layer_name(target, layer) for target in LAYER_TARGETS for layer in layers[target]]
        patterns = [pattern for pattern in self.overrides if target_of(pattern) != "weights"]
        unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if unmatched:
            raise UsageError(
                f"overrides {', '.join(map(repr, unmatched))} match no layer; the model's are {names[0]} to {names[-1]}"
            )

    def _scheme_at(self, target: str, layer: int) -> Scheme:
        name = _layer_name(target, layer)
        matches = (s for p, s in self.overrides.items() if target_of(p) == target and fnmatchcase(name, p))
        return next(matches, getattr(self, target))

    def with_weights_of(self, other: "Recipe") -> "Recipe":
        """This recipe's cache and logits with the other's weights and their rounding."""
        own = {pattern: s for pattern, s in self.overrides.items() if target_of(pattern) != "weights"}
        return replace(self, weights=other.weights, overrides=own | other.weight_overrides, rounding=other.rounding)


RecipeLike = Recipe | str | int | Path | Mapping[str, Any]


def target_of(pattern: str) -> str:
    """The target of an override: one of `LAYER_TARGETS` where its last part says so, else "weights"."""
    last = pattern.rsplit(".", 1)[-1]
    return last if last in LAYER_TARGETS else "weights"


def _layer_name(target: str, layer: int) -> str:
    return f"model.layers.{layer}.self_attn.{target}"


def _parse_overrides(overrides: Mapping[str, str]) -> dict[str, Scheme]:
    unnamed = [pattern for pattern in overrides if not isinstance(pattern, str)]
    if unnamed:
        raise UsageError(f"overrides must map name patterns to schemes; {unnamed[0]!r} is not a pattern")
    return {pattern: _parse_for(target_of(pattern), text) for pattern, text in overrides.items()}


def _parse_for(target: str, text: str | int) -> Scheme:
    return Scheme.parse(text, DEFAULT_GRANULARITY[target], target)


def _check_allowed(target: str, scheme: Scheme, what: str | None = None) -> None:
    what = what or target
    if scheme.quantizes and (refusal := scheme.sharing.refusal(target)):
        raise UsageError(f"{what} {refusal}")
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
