"""How a whole model is quantized: `Recipe`, its targets, its rounding, and recipes by name. No torch."""

from diffquant.recipe.recipe import Recipe, RecipeLike

__all__ = ["Recipe", "RecipeLike"]
