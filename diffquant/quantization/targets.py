"""The modules of a checkpoint that a recipe quantizes, each with its scheme."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from diffquant.model.adapters import Adapter
from diffquant.recipe import Recipe
from diffquant.scheme import FULL, Scheme


def weight_schemes(adapter: Adapter, recipe: Recipe) -> dict[str, Scheme]:
    """Scheme of each module whose weight the recipe quantizes, by the checkpoint's own names.

    The layers' linears follow the recipe's `weights`; embeddings, head and λ projections are
    quantized only where an override names them; vectors never are.
    """
    linears = {name.removesuffix(".weight") for name in adapter.source_linears()}
    schemes = {module: _scheme_of(module, recipe, linears) for module in weight_modules(adapter)}
    return {module: scheme for module, scheme in schemes.items() if scheme.quantizes}


def weight_modules(adapter: Adapter) -> list[str]:
    """Every module whose weight is a matrix, by the checkpoint's own names."""
    return [name.removesuffix(".weight") for name, shape in adapter.source_shapes().items() if len(shape) == 2]


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
