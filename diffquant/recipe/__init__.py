"""A model's quantization settings: number formats, schemes, and the `Recipe`. Imports no torch."""

from diffquant.recipe.recipe import Recipe, RecipeLike

__all__ = ["Recipe", "RecipeLike"]
