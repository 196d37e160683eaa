"""A KV cache that stores packed codes.

Attention reads dequantized keys and values of all tokens except the `residual` newest, also in the call that stores
them. With per-token scales and no residual, results therefore do not depend on how a prompt is split into calls. Each
token is quantized once.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme


class PackedStates:
    """Keys or values of one layer: packed codes of older tokens, 16-bit values of the newest.

    Scales have the dtype of the keys or values, or are bytes in formats that encode scales. With granularity column,
    a block of `scheme.granularity_size` tokens shares one scale per channel and stays unquantized until it is full.
    Blocks are counted from the first position, padding included.
    """

    def __init__(self, scheme: Scheme, residual: int, ranges: Tensor | None = None) -> None:
        """Create empty storage.

        Args:
            scheme: number format and granularity.
            residual: number of newest tokens that stay unquantized.
            ranges: values [H, d] that the largest code represents, for static schemes.
        """
        self.scheme = scheme
        self.ranges = ranges
        self.residual = residual
        self.recent: Tensor | None = None
        self.words: Tensor | None = None
        self.scales: Tensor | None = None
        self.block_lengths: list[int] = []

    @property
    def length(self) -> int:
        """Number of tokens stored."""
        return sum(0 if x is None else x.shape[2] for x in (self.words, self.recent))

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(x.untyped_storage().nbytes() for x in (self.recent, self.words, self.scales) if x is not None)

    def append(self, states: Tensor) -> None:
        """Store the keys or values [B, H, T, d] of new tokens."""
        recent = states if self.recent is None else torch.cat([self.recent, states], 2)
        spilled = self._count_spilled(recent.shape[2])
        if spilled:
            self._quantize(recent[:, :, :spilled])
        recent = recent[:, :, spilled:]
        # Cloned, since a slice keeps its whole tensor allocated: quantized tokens, or queries next to the keys.
        is_slice = spilled or (not torch.compiler.is_compiling() and recent.untyped_storage().nbytes() > recent.nbytes)
        self.recent = recent.clone() if is_slice else recent

    def read(self) -> Tensor:
        """Return the dequantized keys or values of all tokens, [B, H, S, d] in the dtype of those appended.

        Raises:
            UsageError: nothing has been stored yet.
        """
        if self.recent is None:
            raise UsageError("the cache is empty: nothing has been stored in it yet")
        return self.recent if self.words is None else torch.cat([self._dequantize(), self.recent], 2)

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens."""
        if self.recent is None:
            return
        from_recent = min(tokens, self.recent.shape[2])
        self.recent = self.recent[:, :, : self.recent.shape[2] - from_recent].clone()
        self._forget_packed(tokens - from_recent, -1)

    def forget_oldest(self, tokens: int) -> None:
        """Forget the oldest `tokens` tokens; codes and scales of the others do not change."""
        if self.recent is None or tokens <= 0:
            return
        from_packed = self._forget_packed(tokens, 0)
        if tokens > from_packed:
            self.recent = self.recent[:, :, tokens - from_packed :].clone()

    def _forget_packed(self, tokens: int, end: int) -> int:
        """Forget up to `tokens` oldest (end 0) or newest (end -1) packed tokens; return how many were forgotten."""
        if self.words is None or tokens <= 0:
            return 0
        tokens = min(tokens, self.words.shape[2])
        self.words = _drop(self.words, tokens, end)
        if self.scales is not None:
            scales = self._forget_blocks(tokens, end) if self.block_lengths else tokens
            self.scales = _drop(self.scales, scales, end)
        return tokens

    def _forget_blocks(self, tokens: int, end: int) -> int:
        """Forget tokens in the list of block lengths, shortening a partly forgotten block; return the whole blocks."""
        blocks = 0
        while tokens:
            length = self.block_lengths[end]
            if length > tokens:
                self.block_lengths[end] = length - tokens
                break
            self.block_lengths.pop(end)
            tokens -= length
            blocks += 1
        return blocks

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each stored tensor, whose first axis is the batch, by the result of a function."""
        self.recent, self.words, self.scales = (
            None if x is None else change(x) for x in (self.recent, self.words, self.scales)
        )

    def _count_spilled(self, recent: int) -> int:
        """Return how many of the unquantized tokens are to be quantized: whole blocks beyond the residual."""
        if not self.scheme.quantizes:
            return 0
        block = self.scheme.sharing.tokens_per_scale
        return max(recent - self.residual, 0) // block * block

    def _quantize(self, states: Tensor) -> None:
        number_format, sharing = self.scheme.format, self.scheme.sharing
        if sharing.is_static:
            words = number_format.pack(number_format.encode(states, self._static_scale(states)))
            self.words = words if self.words is None else torch.cat([self.words, words], 2)
            return
        view, dim = sharing.view(states)
        scale = number_format.compute_scale(view, dim, states.dtype)
        codes = number_format.encode(view, scale)
        words = number_format.pack(codes if view is states else codes.reshape(states.shape))
        scale = number_format.pack_scale(scale.squeeze(dim))
        if not sharing.is_token_local:
            self.block_lengths += [sharing.tokens_per_scale] * scale.shape[2]
        self.words = words if self.words is None else torch.cat([self.words, words], 2)
        self.scales = scale if self.scales is None else torch.cat([self.scales, scale], 2)

    def _static_scale(self, states: Tensor) -> Tensor:
        """Compute the scales [1, H, 1, d] of a static scheme, with the dtype and device of `states`."""
        if self.ranges is None:
            raise UsageError(f"a cache at {self.scheme} needs calibrated ranges")
        return (self.ranges / self.scheme.format.largest)[None, :, None].to(states)

    def _dequantize(self) -> Tensor:
        if self.words is None or self.recent is None:
            raise UsageError("the cache holds no packed tokens")
        number_format, sharing = self.scheme.format, self.scheme.sharing
        codes = number_format.unpack(self.words, self.recent.shape[-1])
        if self.scales is None:
            return number_format.decode(codes, self._static_scale(self.recent))
        scales = number_format.unpack_scale(self.scales)
        if sharing.is_token_local:
            view, _ = sharing.view(codes)
            values = number_format.decode(view, scales.unsqueeze(-1)).to(self.recent.dtype)
            return values if view is codes else values.flatten(-2)
        lengths = torch.tensor(self.block_lengths, dtype=torch.int64, device=codes.device)
        scales = scales.repeat_interleave(lengths, 2, output_size=sum(self.block_lengths))
        return number_format.decode(codes, scales)


def _drop(x: Tensor, count: int, end: int) -> Tensor:
    """Copy [B, H, S, ...] without its first (end 0) or last (end -1) tokens."""
    return (x[:, :, : x.shape[2] - count] if end else x[:, :, count:]).clone()


class PackedLayer(CacheLayerMixin):
    """One layer of a `PackedCache`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, recipe: Recipe, ranges: Mapping[str, Tensor]) -> None:
        """Create an empty layer.

        Args:
            recipe: recipe of the layer.
            ranges: calibrated ranges by "k" and "v", for static schemes.
        """
        super().__init__()
        self.recipe = recipe
        self.ranges = ranges
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002  transformers' names
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys [B, H, T, d] and values [B, H', T, dv] of new tokens; return those of all tokens, dequantized."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.stored_keys.append(key_states)
        self.stored_values.append(value_states)
        return self.stored_keys.read(), self.stored_values.read()

    @property
    def nbytes(self) -> int:
        return self.stored_keys.nbytes + self.stored_values.nbytes

    def get_seq_length(self) -> int:
        return self.stored_keys.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.stored_keys = PackedStates(self.recipe.k, self.recipe.residual, self.ranges.get("k"))
        self.stored_values = PackedStates(self.recipe.v, self.recipe.residual, self.ranges.get("v"))
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -`tokens_to_remove` tokens; transformers passes a negative number."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop expects the negative number of tokens to forget, got {tokens_to_remove}")
        self._forget_newest(-tokens_to_remove)

    def _forget_newest(self, tokens: int) -> None:
        self.stored_keys.crop(tokens)
        self.stored_values.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._replace_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace_tensors(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace_tensors(lambda x: x[indices])

    def offload(self) -> None:
        self._replace_tensors(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._replace_tensors(lambda x: x.to(self.device, non_blocking=True))

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self.stored_keys.replace_tensors(change)
        self.stored_values.replace_tensors(change)


def ranges_of_layer(ranges: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return the ranges of one layer, renaming "layers.N.k" and "layers.N.v" to "k" and "v"."""
    return {target: ranges[name] for target in ("k", "v") if (name := f"layers.{layer}.{target}") in ranges}


class PackedCache(Cache):
    """KV cache with the recipe's `k`, `v` and `residual`, for `generate(past_key_values=...)`."""

    def __init__(self, recipe: Recipe, layers: int, ranges: Mapping[str, Tensor] | None = None) -> None:
        """Create an empty cache.

        Args:
            recipe: recipe of the model.
            layers: number of layers.
            ranges: calibrated ranges by "layers.N.k" and "layers.N.v", for static schemes.
        """
        of_layers = [ranges_of_layer(ranges or {}, layer) for layer in range(layers)]
        super().__init__(layers=[PackedLayer(recipe.at_layer(i), ranges) for i, ranges in enumerate(of_layers)])
        self.recipe = recipe

    @property
    def nbytes(self) -> int:
        """Allocated bytes, including scales and unquantized tokens."""
        return sum(layer.nbytes for layer in self.layers)
