"""KV caches of layers with a window, which forget tokens that no later query can see."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.model.blocks import TokenRows
from diffquant.model.cache import PackedLayer, ranges_of_layer
from diffquant.recipe import Recipe


class WindowedLayer(PackedLayer):
    """A layer that keeps the window's tokens, except for the next one."""

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
        """Store new tokens and return the keys and values that they see, then forget those that later tokens do not.

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
        """Refused: tokens that would come back into the window are gone.

        Raises:
            UsageError: tokens are to be forgotten.
        """
        if tokens_to_remove:
            raise UsageError("a cache over a window cannot go back: the tokens before it are gone; fill a new one")


def storage_of(rows: TokenRows, layer: int, recipe: Recipe, ranges: Mapping[str, Tensor]) -> PackedLayer:
    """Empty storage for a layer's keys and values under a model's recipe.

    Args:
        layer: number of the layer.
        ranges: ranges by "layers.N.k" and "layers.N.v" where the recipe's schemes are static.
    """
    own = recipe.at_layer(layer), ranges_of_layer(ranges, layer)
    return PackedLayer(*own) if rows.window is None else WindowedLayer(*own, rows.window)


class WindowsCache(Cache):
    """A cache some of whose layers keep all tokens, and some those of a window, under the recipe's `k` and `v`."""

    layers: list[Any]

    def __init__(self, recipe: Recipe, layers: list[Any], whole: int, windowed: int | None) -> None:
        """An empty cache.

        Args:
            recipe: recipe of the model.
            layers: storage of each layer, which `storage_of` gives those with keys and values.
            whole: number of a layer that keeps all tokens.
            windowed: index of a layer that keeps only a window, or None if there is none.
        """
        super().__init__(layers=layers)
        self.recipe = recipe
        self._whole, self._windowed = whole, windowed

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Number of tokens read, all of which some layer keeps."""
        return int(self.layers[self._whole if layer_idx is None else layer_idx].get_seq_length())

    @property
    def held(self) -> int:
        """Number of tokens that windowed layers hold."""
        return 0 if self._windowed is None else self.get_seq_length(self._windowed)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, scales and states included."""
        return sum(layer.nbytes for layer in self.layers)
