"""A KV cache that stores packed codes.

Attention reads what is stored: a token beyond the `residual` newest is read back quantized, also by
the call that brought it. With scales per token and no residual a result therefore does not depend on
how the tokens were batched or chunked. A token is quantized once and never again.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme


class PackedStates:
    """Keys or values of one layer: packed codes of the older tokens, 16-bit states of the newest.

    Scales have the dtype of the states, or are the bytes that their format makes of them. Per column, `scheme.size`
    tokens share the scales of their channels and wait unquantized until their block is full; blocks are counted from
    the first position, so left padding moves their borders.
    """

    def __init__(self, scheme: Scheme, residual: int, ranges: Tensor | None = None) -> None:
        """Empty storage.

        Args:
            scheme: format of the codes and what shares a scale.
            residual: number of newest tokens that stay unquantized.
            ranges: [H, d] what the largest code stands for, where the scheme is static.
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
        """Bytes of the storages behind the tensors."""
        return sum(x.untyped_storage().nbytes() for x in (self.recent, self.words, self.scales) if x is not None)

    def append(self, states: Tensor) -> None:
        """Store new tokens' states [B, H, T, d]."""
        recent = states if self.recent is None else torch.cat([self.recent, states], 2)
        spilled = self._count_spilled(recent.shape[2])
        if spilled:
            self._quantize(recent[:, :, :spilled])
        # A slice would keep the storage of what was spilled alive.
        self.recent = recent[:, :, spilled:].clone() if spilled else recent

    def read(self) -> Tensor:
        """States of all tokens as they read back, [B, H, S, d] in the dtype they came in."""
        if self.recent is None:
            raise UsageError("the cache is empty: nothing has been stored in it yet")
        return self.recent if self.words is None else torch.cat([self._dequantize(), self.recent], 2)

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens."""
        if self.recent is None:
            return
        from_recent = min(tokens, self.recent.shape[2])
        self.recent = self.recent[:, :, : self.recent.shape[2] - from_recent].clone()
        if tokens > from_recent:
            self._crop_packed(tokens - from_recent)

    def forget_oldest(self, tokens: int) -> None:
        """Forget the oldest `tokens` tokens; those that stay keep their codes, and the scales that they share."""
        if self.recent is None or tokens <= 0:
            return
        from_packed = 0 if self.words is None else min(tokens, self.words.shape[2])
        if self.words is not None and from_packed:
            self.words = self.words[:, :, from_packed:].clone()
            scales = self._forget_blocks(from_packed) if self.block_lengths else from_packed
            self.scales = None if self.scales is None else self.scales[:, :, scales:].clone()
        if tokens > from_packed:
            self.recent = self.recent[:, :, tokens - from_packed :].clone()

    def _forget_blocks(self, tokens: int) -> int:
        """Number of blocks that go with the oldest `tokens` tokens; one that goes in part gets shorter."""
        blocks = 0
        while tokens:
            length = self.block_lengths[0]
            if length > tokens:
                self.block_lengths[0] = length - tokens
                return blocks
            self.block_lengths.pop(0)
            tokens -= length
            blocks += 1
        return blocks

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every stored tensor, all of which have the batch first."""
        self.recent, self.words, self.scales = (
            None if x is None else change(x) for x in (self.recent, self.words, self.scales)
        )

    def _count_spilled(self, recent: int) -> int:
        """Number of tokens that leave the residual window, whole blocks of them."""
        if not self.scheme.quantizes:
            return 0
        block = self.scheme.sharing.tokens
        return max(recent - self.residual, 0) // block * block

    def _quantize(self, states: Tensor) -> None:
        number_format, sharing = self.scheme.format, self.scheme.sharing
        if sharing.is_static:
            words = number_format.pack(number_format.codes(states, self._static_scale(states)))
            self.words = words if self.words is None else torch.cat([self.words, words], 2)
            return
        view, dim = sharing.view(states)
        scale = number_format.scale(view, dim, states.dtype)
        codes = number_format.codes(view, scale)
        words = number_format.pack(codes if view is states else codes.reshape(states.shape))
        scale = number_format.pack_scale(scale.squeeze(dim))
        if not sharing.by_token:
            self.block_lengths += [sharing.tokens] * scale.shape[2]
        self.words = words if self.words is None else torch.cat([self.words, words], 2)
        self.scales = scale if self.scales is None else torch.cat([self.scales, scale], 2)

    def _static_scale(self, states: Tensor) -> Tensor:
        """Scales [1, H, 1, d] of a static scheme, in the dtype and on the device of the states."""
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
        if sharing.by_token:
            view, _ = sharing.view(codes)
            values = number_format.decode(view, scales.unsqueeze(-1)).to(self.recent.dtype)
            return values if view is codes else values.flatten(-2)
        lengths = torch.tensor(self.block_lengths, dtype=torch.int64, device=codes.device)
        scales = scales.repeat_interleave(lengths, 2, output_size=sum(self.block_lengths))
        return number_format.decode(codes, scales)

    def _crop_packed(self, tokens: int) -> None:
        if self.words is None:
            return
        remaining = max(self.words.shape[2] - tokens, 0)
        self.words = self.words[:, :, :remaining].clone()
        if self.scales is None:
            return
        if not self.scheme.sharing.by_token:
            tokens = sum(self.block_lengths) - remaining
            while tokens:
                last = self.block_lengths.pop()
                if last > tokens:
                    self.block_lengths.append(last - tokens)
                tokens -= min(last, tokens)
            remaining = len(self.block_lengths)
        self.scales = self.scales[:, :, :remaining].clone()


class PackedLayer(CacheLayerMixin):
    """One layer of a `PackedCache`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, recipe: Recipe, ranges: Mapping[str, Tensor]) -> None:
        """An empty layer.

        Args:
            recipe: recipe of the layer.
            ranges: ranges by "k" and "v" where the recipe's schemes are static.
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
        """Store [B, H, T, d] keys and [B, H', T, dv] values; return all of both as they read back."""
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
        """Forget the newest tokens; the count is negative, as transformers passes it."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}")
        self.stored_keys.crop(-tokens_to_remove)
        self.stored_values.crop(-tokens_to_remove)

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
    """Ranges by "k" and "v" of one layer, of those by "layers.N.k" and "layers.N.v"."""
    return {target: ranges[name] for target in ("k", "v") if (name := f"layers.{layer}.{target}") in ranges}


class PackedCache(Cache):
    """KV cache with the recipe's `k`, `v` and `residual`, for `generate(past_key_values=...)`."""

    def __init__(self, recipe: Recipe, layers: int, ranges: Mapping[str, Tensor] | None = None) -> None:
        """An empty cache.

        Args:
            recipe: recipe of the model.
            layers: number of layers.
            ranges: ranges by "layers.N.k" and "layers.N.v" where the recipe's schemes are static.
        """
        of_layers = [ranges_of_layer(ranges or {}, layer) for layer in range(layers)]
        super().__init__(layers=[PackedLayer(recipe.at_layer(i), ranges) for i, ranges in enumerate(of_layers)])
        self.recipe = recipe

    @property
    def nbytes(self) -> int:
        """Bytes of all storages, scales and the 16-bit window included."""
        return sum(layer.nbytes for layer in self.layers)
