"""How a whole model is quantized: number formats, schemes, and the `Recipe` of a model. No torch."""

from diffquant.recipe.recipe import Recipe, RecipeLike

__all__ = ["Recipe", "RecipeLike"]
