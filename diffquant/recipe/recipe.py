"""`Recipe`: how a model is quantized, as a scheme for each target, overrides by name, and a rounding."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from diffquant.errors import UsageError
from diffquant.recipe.presets import LIKE, PRESETS
from diffquant.recipe.rounding import NEAREST, RoundingSettings
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.recipe.targets import (
    LAYER_TARGETS,
    TARGETS,
    UNSAID,
    layer_target_name,
    parse_overrides,
    parse_target_scheme,
    refusal,
    target_of,
)
from diffquant.support.files import read_text
from diffquant.support.installation import CONFIG_VERSION
from diffquant.support.names import did_you_mean


@dataclass(frozen=True, repr=False)
class Recipe:
    """A model's quantization settings: one scheme for each target, 16 bits by default.

    Most recipes are made from text, with `Recipe.of`:

        >>> Recipe.of(weights="4:g32", kv=8)
        Recipe.of(weights='4:g32', kv='8:row')

    Attributes:
        weights: scheme of the linear layers' weights.
        k, v: schemes of the KV cache.
        logits: scheme of Q·Kᵀ·scale of each map, before softmax (simulated).
        qk: scheme of the queries and keys in Q·Kᵀ (simulated).
        p: scheme of each map's softmax weights before division by their row's sum (simulated).
        pv: scheme of the values that softmax weights multiply, in addition to the cache's scheme (simulated).
        activations: scheme of the inputs of Linears with quantized weights, as `diffquant.model.inputs` rounds them.
        residual: number of newest tokens in the cache that stay 16-bit.
        overrides: schemes by name pattern (shell wildcards); the first match wins. A pattern that ends in ".k", ".v",
            ".logits", ".qk", ".p" or ".pv" matches that target of layers, such as "model.layers.3.self_attn.k". One
            that ends in ".activations" matches modules' inputs, such as "*.q_proj.activations". Any other pattern
            matches modules and sets the scheme of their weights.
        rounding: the rule that computes the weights' codes and scales.
    """

    weights: Scheme = FULL
    k: Scheme = FULL
    v: Scheme = FULL
    logits: Scheme = FULL
    qk: Scheme = FULL
    p: Scheme = FULL
    pv: Scheme = FULL
    activations: Scheme = FULL
    residual: int = 0
    overrides: Mapping[str, Scheme] = field(default_factory=dict)
    rounding: RoundingSettings = NEAREST

    def __post_init__(self) -> None:
        of_text = "to read text use Recipe.of(weights='4:g32', overrides={'*.mlp.*': 8}, rounding='mse')"
        if not isinstance(self.overrides, Mapping) or not isinstance(self.rounding, RoundingSettings):
            raise UsageError(f"a Recipe takes overrides as a mapping, and rounding as RoundingSettings; {of_text}")
        schemes = [(target, target, getattr(self, target)) for target in TARGETS]
        schemes += [(target_of(pattern), f"override {pattern!r}", each) for pattern, each in self.overrides.items()]
        for target, what, scheme in schemes:
            if not isinstance(scheme, Scheme):
                raise UsageError(f"a Recipe takes Scheme objects, but {what} is {scheme!r}; {of_text}")
            if reason := refusal(target, scheme, what):
                raise UsageError(reason)
        if type(self.residual) is not int:
            raise UsageError(f"residual must be a number of tokens, got {self.residual!r}")
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
        activations: str | int = 16,
    ) -> "Recipe":
        """Make a recipe from schemes that are written as text, such as "4:g32".

        Args:
            kv: scheme of `k` and of `v`, for each of them that is None.
            rounding: a rounding's name, or a mapping as `RoundingSettings.parse` reads it.
        """
        schemes = {"weights": weights, "kv": kv, "k": k, "v": v, "logits": logits, "qk": qk, "p": p, "pv": pv}
        schemes["activations"] = activations
        given = {name: text for name, text in schemes.items() if name not in ("k", "v") or text is not None}
        return cls.from_dict({**given, "residual": residual, "overrides": overrides, "rounding": rounding})

    @classmethod
    def parse(cls, given: "RecipeLike") -> "Recipe":
        """Make a recipe from a weight scheme, a preset's name, a mapping, or the path of a YAML file.

        Args:
            given: a `Recipe`, returned unchanged; a weight scheme such as "4:g32" or 8; a preset's name such as "int4";
                a mapping for `from_dict` such as {"weights": "4:g32", "kv": 8}; or the path of a YAML file, as a `Path`
                or as text that ends in .yaml or .yml.

        Raises:
            UsageError: it is none of these, or the file cannot be read.
        """
        if isinstance(given, Recipe):
            return given
        if is_recipe_file(given):
            return cls.read(Path(given))
        if isinstance(given, str) and given in PRESETS:
            return cls.of(**PRESETS[given])
        if isinstance(given, str | int):
            return cls.of(weights=given)
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        raise UsageError(
            f"a recipe is a weight scheme such as '4:g32', a mapping such as {{'weights': '4:g32', 'kv': 8}}, "
            f"the path of a YAML file or a Recipe; got {given!r}"
        )

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> "Recipe":
        """Make a recipe from plain data, such as `to_dict` returns.

        Args:
            entries: the recipe's attributes by name, with schemes as text. The entry `kv` stands for `k` and `v`. The
                entry `like` names a published kernel of `presets.LIKE`, whose schemes of `qk`, `p` and `pv` are used.
                Attributes that have their own entries take precedence over both.

        Raises:
            UsageError: a key is unknown (the message suggests the nearest), a scheme is malformed, or there is a
                residual without a quantized cache.
        """
        if "like" in entries:
            kernel = entries["like"]
            if kernel not in tuple(LIKE):
                raise UsageError(f"unknown kernel {kernel!r} for like; choose from {', '.join(LIKE)}")
            entries = {**LIKE[kernel], **{name: value for name, value in entries.items() if name != "like"}}
        known = [*(f.name for f in fields(cls)), "kv"]
        unknown = [key for key in entries if key not in known]
        if unknown:
            raise UsageError("; ".join(f"unknown recipe key {key!r}{did_you_mean(str(key), known)}" for key in unknown))
        overrides = entries.get("overrides") or {}
        residual = entries.get("residual", 0)
        if not isinstance(overrides, Mapping):
            raise UsageError(f"overrides must map name patterns to schemes, got {overrides!r}")
        if "kv" in entries:
            entries = {"k": entries["kv"], "v": entries["kv"], **entries}
        schemes = {target: parse_target_scheme(target, entries[target]) for target in TARGETS if target in entries}
        rounding = RoundingSettings.parse(entries.get("rounding", NEAREST.name))
        recipe = cls(**schemes, residual=residual, overrides=parse_overrides(overrides), rounding=rounding)
        if residual and not recipe.quantizes_any("k", "v"):
            raise UsageError(f"residual {residual} keeps the newest tokens of a quantized cache: quantize kv, too")
        return recipe

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        """Read a recipe from a YAML file."""
        # Imported here, because importing yaml is slow and recipes made from options do not need it.
        from diffquant.support.yaml_text import parse_yaml

        try:
            entries = parse_yaml(read_text(path))
        except FileNotFoundError:
            raise UsageError(f"there is no recipe file {path}") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"recipe {path} is not UTF-8 text") from error
        except OSError as error:
            raise UsageError(f"cannot read recipe {path}: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"cannot read recipe {path}: {error}") from error
        if not isinstance(entries, dict):
            raise UsageError(f"recipe {path} must be a mapping of {', '.join(f.name for f in fields(cls))}")
        try:
            return cls.from_dict(entries)
        except UsageError as error:
            raise UsageError(f"recipe {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, with schemes as text.

        `qk`, `p`, `pv` and `activations` are left out if they are not quantized, and `rounding` if it is the default.
        """
        schemes = {target: getattr(self, target) for target in TARGETS}
        stated = {target: str(s) for target, s in schemes.items() if s.quantizes or target not in UNSAID}
        rounding = {} if self.rounding == NEAREST else {"rounding": self.rounding.to_plain()}
        return {
            **stated,
            "residual": self.residual,
            "overrides": {pattern: str(scheme) for pattern, scheme in self.overrides.items()},
            **rounding,
        }

    def to_config(self) -> dict[str, Any]:
        """Return the content of `diffquant_config` in the config.json of a checkpoint with this recipe."""
        return {"version": CONFIG_VERSION, "recipe": self.to_dict()}

    def __repr__(self) -> str:
        """Return a Python expression that makes the recipe, without defaults."""
        entries, defaults = self.to_dict(), Recipe().to_dict()
        if entries["k"] == entries["v"]:
            entries = {"weights": entries["weights"], "kv": entries.pop("k"), **entries, "v": defaults["v"]}
            defaults["kv"] = defaults["k"]
        stated = {name: value for name, value in entries.items() if value != defaults.get(name)}
        return f"Recipe.of({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def weight_scheme(self, module: str) -> Scheme:
        """Return the scheme of a linear layer's weight, given the layer's full name without ".weight"."""
        return self._scheme_of("weights", module)

    @cached_property
    def weight_overrides(self) -> dict[str, Scheme]:
        return {pattern: scheme for pattern, scheme in self.overrides.items() if target_of(pattern) == "weights"}

    def input_scheme(self, module: str) -> Scheme:
        """Return the scheme of the input of a module with a quantized weight, given the module's full name."""
        return self._scheme_of("activations", f"{module}.activations")

    def at_layer(self, layer: int) -> "Recipe":
        """Return this recipe for one layer, with the layer's overrides applied; only overrides of weights remain.

        Args:
            layer: index of the layer, from 0.
        """
        of_layer = {target: self._scheme_of(target, layer_target_name(target, layer)) for target in LAYER_TARGETS}
        return replace(self, **of_layer, overrides=self.weight_overrides)  # type: ignore[arg-type]

    def schemes_of(self, target: str) -> set[Scheme]:
        """Return all schemes of a target other than "weights": the recipe's own and those of overrides."""
        return {getattr(self, target)} | {s for pattern, s in self.overrides.items() if target_of(pattern) == target}

    def rounding_texts(self, target: str) -> list[str]:
        """Return the schemes of a target other than "weights" that quantize it, as sorted texts; empty if none does."""
        return sorted({str(scheme) for scheme in self.schemes_of(target) if scheme.quantizes})

    @property
    def schemes(self) -> set[Scheme]:
        """All schemes in the recipe."""
        return {*(getattr(self, target) for target in TARGETS), *self.overrides.values()}

    def quantizes_any(self, *targets: str) -> bool:
        """Return whether any of the given targets, which must not include "weights", is quantized in any layer."""
        return any(scheme.quantizes for target in targets for scheme in self.schemes_of(target))

    @property
    def map_rounding_choices(self) -> set[bool]:
        """Distinct answers, over all layers, to whether a layer rounds its attention maps (`logits` or `p`).

        It is {True}, {False}, or {True, False} if layers differ.
        """
        logits, weights = ({s.quantizes for s in self.schemes_of(target)} for target in ("logits", "p"))
        return {a or b for a in logits for b in weights}

    def is_static(self, target: str) -> bool:
        """Return whether any layer has calibrated scales for a target: "k", "v" or "logits"."""
        return any(scheme.sharing.is_static for scheme in self.schemes_of(target))

    def _scheme_of(self, target: str, name: str) -> Scheme:
        matches = (s for p, s in self.overrides.items() if target_of(p) == target and fnmatchcase(name, p))
        return next(matches, getattr(self, target))

    def with_weights_of(self, other: "Recipe") -> "Recipe":
        """Return this recipe with the weight schemes and the rounding of another recipe."""
        own = {pattern: s for pattern, s in self.overrides.items() if target_of(pattern) != "weights"}
        return replace(self, weights=other.weights, overrides=own | other.weight_overrides, rounding=other.rounding)


RecipeLike = Recipe | str | int | Path | Mapping[str, Any]


def is_recipe_file(given: object) -> TypeGuard[Path | str]:
    """Return whether a recipe is given as the path of a YAML file."""
    return isinstance(given, Path) or (isinstance(given, str) and given.endswith((".yaml", ".yml")))
