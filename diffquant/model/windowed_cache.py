"""Caches of windowed and recurrent layers, which keep only the newest tokens or a recurrent state."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.model.blocks import CachedShapes
from diffquant.model.cache import PackedLayer, ranges_of_layer
from diffquant.recipe import Recipe


class WindowedLayer(PackedLayer):
    """Cache of a layer with a sliding window. It keeps the window - 1 newest tokens, which the next token sees."""

    is_croppable = False

    def __init__(self, recipe: Recipe, ranges: Mapping[str, Tensor], window: int) -> None:
        """Create an empty layer.

        Args:
            recipe, ranges: as in `PackedLayer`.
            window: number of newest tokens that a query sees, including its own.
        """
        super().__init__(recipe, ranges)
        self.window = window

    def update(  # type: ignore[override]  # transformers passes on layer-specific arguments
        self, key_states: Tensor, value_states: Tensor, *args: object, needed: int | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens, return the keys and values that they may see, then forget those outside the window.

        Args:
            key_states, value_states: new keys [B, H, T, d] and values [B, H', T, dv].
            needed: number of newest tokens to keep, from `Mask.count_needed_keys`; window - 1 by default.

        Returns:
            Dequantized keys and values of the tokens kept so far and of the new ones.
        """
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        oldest = keys.shape[2] - (self.window - 1 if needed is None else needed)
        self.stored_keys.forget_oldest(oldest)
        self.stored_values.forget_oldest(oldest)
        return keys, values

    def get_max_length(self) -> int:
        return self.window - 1

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget newest tokens, since the older tokens that the window would need are gone.

        Raises:
            UsageError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise UsageError("a windowed cache cannot restore earlier tokens, which are gone; fill a new one")


def create_storage(shapes: CachedShapes, layer: int, recipe: Recipe, ranges: Mapping[str, Tensor]) -> PackedLayer:
    """Create empty storage for a layer's keys and values under a model's recipe.

    Args:
        shapes: shapes to cache per token.
        layer: 0-based index of the layer.
        recipe: recipe of the model.
        ranges: calibrated ranges by "layers.N.k" and "layers.N.v", for static schemes.
    """
    own = recipe.at_layer(layer), ranges_of_layer(ranges, layer)
    return PackedLayer(*own) if shapes.window is None else WindowedLayer(*own, shapes.window)


class MixedCache(Cache):
    """A cache under the recipe's `k` and `v` whose layers keep all tokens, a window of tokens or a recurrent state."""

    layers: list[Any]

    def __init__(self, recipe: Recipe, layers: list[Any]) -> None:
        """Create an empty cache.

        Args:
            recipe: recipe of the model.
            layers: storage of each layer: from `create_storage` for keys and values, or a `RecurrentLayer`.
        """
        super().__init__(layers=layers)
        self.recipe = recipe

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return the number of tokens stored in a layer; without `layer_idx`, in a layer that keeps all tokens."""
        if layer_idx is not None:
            return int(self.layers[layer_idx].get_seq_length())
        layers = [layer for layer in self.layers if isinstance(layer, PackedLayer)]
        return max(layer.get_seq_length() for layer in layers if not isinstance(layer, WindowedLayer))

    @property
    def windowed_length(self) -> int:
        """Number of tokens in the caches of windowed layers."""
        return next((layer.get_seq_length() for layer in self.layers if isinstance(layer, WindowedLayer)), 0)

    def recurrent_layer(self, layer: int) -> "RecurrentLayer":
        """Return the cache of a recurrent layer.

        Raises:
            UsageError: the layer keeps keys and values, because the cache belongs to another model.
        """
        states = self.layers[layer]
        if not isinstance(states, RecurrentLayer):
            raise UsageError(f"layer {layer} of the cache holds no recurrent state; pass the result of new_cache()")
        return states

    @property
    def nbytes(self) -> int:
        """Allocated bytes, including scales and recurrent states."""
        return sum(layer.nbytes for layer in self.layers)


class RecurrentLayer:
    """Cache of a Mamba layer: the newest inputs of its convolution, and its state.

    W is the convolution's width, E the number of its channels and N the size of a channel's state.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self._parts: tuple[Tensor, Tensor] | None = None

    @property
    def is_empty(self) -> bool:
        return self._parts is None

    @property
    def nbytes(self) -> int:
        return 0 if self._parts is None else sum(x.untyped_storage().nbytes() for x in self._parts)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the convolution's newest inputs [B, W - 1, E] and the state [B, E, N].

        Raises:
            UsageError: nothing has been written yet.
        """
        if self._parts is None:
            raise UsageError("the cache is empty: nothing has been stored in it yet")
        return self._parts

    def write(self, inputs: Tensor, state: Tensor) -> None:
        """Replace the stored inputs [B, W - 1, E] and state [B, E, N]."""
        # Cloned, since a slice would keep the memory of all inputs of a prompt allocated.
        self._parts = inputs.clone(), state.clone()

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._parts = None

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget tokens, since earlier states are not stored.

        Raises:
            UsageError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise UsageError("a recurrent state cannot return to earlier tokens; fill a new cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._parts is not None:
            self._parts = change(self._parts[0]), change(self._parts[1])
