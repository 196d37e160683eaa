"""A layer of a KV cache whose attention sees a window: what no later query can see is forgotten."""

from collections.abc import Mapping

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.model.blocks import TokenRows
from diffquant.model.cache import PackedLayer, ranges_of_layer
from diffquant.recipe import Recipe


class WindowedLayer(PackedLayer):
    """A layer that keeps the window's tokens, all but the one that is to come."""

    is_croppable = False

    def __init__(self, recipe: Recipe, ranges: Mapping[str, Tensor], window: int) -> None:
        """An empty layer.

        Args:
            recipe, ranges: as `PackedLayer` takes them.
            window: number of newest tokens that a query sees, itself included.
        """
        super().__init__(recipe, ranges)
        self.window = window

    def update(  # type: ignore[override]  # transformers hands every layer's own arguments on
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        needed: int | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens and return what they see, then forget what later tokens do not.

        Args:
            key_states, value_states: [B, H, T, d] keys and [B, H', T, dv] values.
            needed: number of newest tokens that stay, as `Mask.needed_keys` counts them where some are padding.

        Returns:
            Keys and values of the tokens that were kept and of the new ones, as they read back.
        """
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        oldest = keys.shape[2] - (self.window - 1 if needed is None else needed)
        self.stored_keys.forget_oldest(oldest)
        self.stored_values.forget_oldest(oldest)
        return keys, values

    def get_max_length(self) -> int:
        return self.window - 1

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: tokens that come back into the window are gone.

        Raises:
            UsageError: tokens are to be forgotten.
        """
        if tokens_to_remove:
            raise UsageError("a cache over a window cannot go back: the tokens before it are gone; fill a new one")


def storage_of(rows: TokenRows, layer: int, recipe: Recipe, ranges: Mapping[str, Tensor]) -> PackedLayer:
    """Empty storage for what a layer keeps of each token, as a model's recipe wants it.

    Args:
        layer: number of the layer.
        ranges: ranges by "layers.N.k" and "layers.N.v" where the recipe's schemes are static.
    """
    own = recipe.at_layer(layer), ranges_of_layer(ranges, layer)
    return PackedLayer(*own) if rows.window is None else WindowedLayer(*own, rows.window)
