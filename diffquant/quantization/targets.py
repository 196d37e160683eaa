"""The modules of a checkpoint that a recipe quantizes, each with its scheme."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from diffquant.recipe import Recipe
from diffquant.scheme import FULL, Scheme
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource


@dataclass(frozen=True)
class Targets:
    """The modules of a checkpoint whose weights can be packed, by the checkpoint's own names.

    Attributes:
        weights: name of the weight of each module that can be packed.
        linears: modules that a recipe's `weights` is about; others are packed where an override names them.
        is_tied: whether the head is the embedding.
    """

    weights: Mapping[str, str]
    linears: Collection[str]
    is_tied: bool

    def schemes(self, recipe: Recipe) -> dict[str, Scheme]:
        """Scheme of each module whose weight the recipe quantizes.

        The linears follow the recipe's `weights`; embeddings, head, λ projections and what rules keep are
        quantized only where an override names them; vectors never are.
        """
        schemes = {module: _scheme_of(module, recipe, self.linears) for module in self.weights}
        return {module: scheme for module, scheme in schemes.items() if scheme.quantizes}


def targets_of(source: Source | WeightSource) -> Targets:
    """The targets of a checkpoint: known by its adapter, or chosen by the rules of a `WeightSource`."""
    if isinstance(source, WeightSource):
        is_tied = bool(source.checkpoint.config.get("tie_word_embeddings"))
        return Targets(source.weights, set(source.linears), is_tied)
    parameters = source.adapter.source_parameters
    weights = {name.removesuffix(".weight"): name for name, each in parameters.items() if each.packing != "never"}
    linears = {module for module, name in weights.items() if parameters[name].packing == "weights"}
    return Targets(weights, linears, source.adapter.architecture.tie_word_embeddings)


def _scheme_of(module: str, recipe: Recipe, linears: Collection[str]) -> Scheme:
    if module in linears:
        return recipe.weight_scheme(module)
    named = (scheme for pattern, scheme in recipe.weight_overrides.items() if _is_meant(pattern, module, linears))
    return next(named, FULL)


def _is_meant(pattern: str, module: str, linears: Collection[str]) -> bool:
    """Whether a pattern means a head, embedding or λ projection: "*" and "*.layers.0.*" do not."""
    if not fnmatchcase(module, pattern):
        return False
    return module.rsplit(".", 1)[-1] in pattern or not any(fnmatchcase(linear, pattern) for linear in linears)
