"""The cache of a SambaY model: states of Mamba, keys and values over windows, and those that upper layers share."""

from collections.abc import Callable, Mapping

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.model.architecture import Architecture
from diffquant.model.blocks import TokenRows
from diffquant.model.windowed_cache import WindowsCache, storage_of
from diffquant.recipe import Recipe


class RecurrentLayer:
    """A Mamba layer's cache: the newest inputs, and the state."""

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
        """Inputs [B, W - 1, E] that the convolution goes on from, and the state [B, E, N].

        Raises:
            UsageError: nothing was written.
        """
        if self._parts is None:
            raise UsageError("the cache is empty: nothing has been stored in it yet")
        return self._parts

    def write(self, inputs: Tensor, state: Tensor) -> None:
        """Replace the stored inputs and state."""
        # A slice would keep the inputs of a whole prompt alive.
        self._parts = inputs.clone(), state.clone()

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._parts = None

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a state does not hold the states before it.

        Raises:
            UsageError: tokens are to be forgotten.
        """
        if tokens_to_remove:
            raise UsageError("a recurrent state cannot go back to earlier tokens; fill a new cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._parts is not None:
            self._parts = change(self._parts[0]), change(self._parts[1])


class SambaYCache(WindowsCache):
    """Cache of the layers that keep something, the recipe's `k`, `v` and `residual` in those with attention."""

    def __init__(self, recipe: Recipe, architecture: Architecture, ranges: Mapping[str, Tensor] | None = None) -> None:
        """An empty cache.

        Args:
            recipe: recipe of the model.
            architecture: architecture whose blocks say what is kept.
            ranges: ranges by "layers.N.k" and "layers.N.v" where the recipe's schemes are static.
        """
        stored = enumerate(blocks["attn"].stored for blocks in architecture.layers)
        layers = [
            storage_of(kept, layer, recipe, ranges or {}) if isinstance(kept, TokenRows) else RecurrentLayer()
            for layer, kept in stored
            if kept is not None
        ]
        # The full attention's layer is the last that keeps something, and the second layer has a window.
        super().__init__(recipe, layers, whole=-1, windowed=1)

    def recurrent(self, layer: int) -> RecurrentLayer:
        """A Mamba layer's cache.

        Raises:
            UsageError: the layer keeps something else.
        """
        kept = self.layers[layer]
        if not isinstance(kept, RecurrentLayer):
            raise UsageError(f"layer {layer} of the cache holds no recurrent state")
        return kept
