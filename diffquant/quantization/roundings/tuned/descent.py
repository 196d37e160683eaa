"""Gradient descent on the codes and scales of a layer's weights, all at once, towards the 16-bit layer's output.

Source: Cheng et al., SignRound, arXiv 2309.05516, which AutoRound implements: what decides a code's rounding is a
parameter, through which gradients pass unchanged. It starts from the nearest codes; this one starts from gptq's, with
scales that may move freely, and Adam in place of the gradient's sign.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.model.walk import Walk
from diffquant.numbers.formats import NumberFormat
from diffquant.quantization.roundings.gptq.sequence import LayerWeights, Made
from diffquant.scheme import Scheme

_STEPS = 150
# About how far the steps take a number that always goes one way: a code by one, a scale by a quarter of it.
_CODE_TRAVEL, _SCALE_TRAVEL = 1.0, 0.25
# How far from its code a weight may start, in codes; one at 0.5 would change its code in the first step.
_FARTHEST_START = 0.3


class _Ladder:
    """The levels of a format as numbers of their codes, between which places can move.

    Attributes:
        first, last: lowest and last code.
    """

    def __init__(self, number_format: NumberFormat) -> None:
        self._format, levels = number_format, number_format.levels
        self.first = -levels.index(0)
        self.last = self.first + len(levels) - 1
        # A code further is a level further: half the distance of the two around, where levels are unevenly far apart.
        around = torch.tensor((2 * levels[0] - levels[1], *levels, 2 * levels[-1] - levels[-2]))
        self._steps = None if number_format.is_even else (around[2:] - around[:-2]) / 2

    def levels(self, codes: Tensor) -> Tensor:
        """Levels of codes that are whole numbers in float32."""
        return codes if self._steps is None else self._format.values(codes.to(torch.int8), codes.dtype)

    def per_code_(self, values: Tensor, codes: Tensor) -> Tensor:
        """Values for each level as values for each code there, in place."""
        return values if self._steps is None else values.mul_(self._steps[codes.int() - self.first])

    def storable(self, scale: Tensor) -> Tensor:
        """Scales as they are stored, where a byte holds them; 16 bits are so near that descent need not see them."""
        is_coarse = self._format.stored_scale_dtype(scale.dtype).itemsize == 1
        return self._format.storable(scale, scale.dtype) if is_coarse else scale


class _Rounded(torch.autograd.Function):
    """A weight from places between codes and stretched scales, whose gradient passes through rounding.

    One function in place of several: all weights of a layer do not fit in a CPU's cache, and each would read them anew.
    """

    @staticmethod
    def forward(ctx: Any, place: Tensor, stretch: Tensor, scale: Tensor, ladder: _Ladder) -> Tensor:
        codes, stretched = place.round(), ladder.storable(scale * (1 + stretch))
        ctx.ladder = ladder
        ctx.save_for_backward(codes, stretched, scale)
        return _times(ladder.levels(codes), stretched)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        codes, stretched, scale = ctx.saved_tensors
        levels = ctx.ladder.levels(codes)
        of_stretch = torch.linalg.vecdot(_by_scale(gradient, scale), _by_scale(levels, scale)).mul_(scale)
        return ctx.ladder.per_code_(_times(gradient, stretched), codes), of_stretch, None, None


def _by_scale(values: Tensor, scale: Tensor) -> Tensor:
    """Values [out, in] as [out, in/g, g], for a scale [out, in/g]."""
    parted: Tensor = values.unflatten(1, (scale.shape[1], -1))
    return parted


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """Values [out, in] times the scale [out, in/g] of each."""
    product: Tensor = (_by_scale(values, scale) * scale[..., None]).flatten(1)
    return product


class _Latent(nn.Module):
    """A weight's codes and scale as numbers that can descend.

    Attributes:
        place: what is rounded to each code, [out, in]; it starts near the code, on the side of the 16-bit weight.
        stretch: change of each scale as a share of it, [out, in/g] or [out, 1].
    """

    def __init__(self, weight: Tensor, made: Made, scheme: Scheme) -> None:
        super().__init__()
        codes, scale = made[0].float(), made[1]
        self._format, self._dtype, self._scale = scheme.format, scale.dtype, scale.float()
        self._ladder = _Ladder(scheme.format)
        away = _times(weight, 1 / self._scale) - self._ladder.levels(codes)
        away /= self._ladder.per_code_(torch.ones_like(away), codes)
        self.place = nn.Parameter(codes + away.clamp(-_FARTHEST_START, _FARTHEST_START))
        self.stretch = nn.Parameter(torch.zeros_like(self._scale))
        self.stay_in_range()

    def forward(self) -> Tensor:
        """The weight [out, in], whose gradient passes through rounding."""
        weight: Tensor = _Rounded.apply(self.place, self.stretch, self._scale, self._ladder)
        return weight

    def stay_in_range(self) -> None:
        """Bring places beyond the last code of either end back to where they are rounded to it."""
        self.place.data.clamp_(self._ladder.first - _FARTHEST_START, self._ladder.last + _FARTHEST_START)

    def made(self) -> Made:
        """Codes int8 and scale as they are stored."""
        scale = self._format.storable(self._scale * (1 + self.stretch), self._dtype)
        return self.place.round().to(torch.int8), scale


class _Output(nn.Module):
    """A layer's hidden states, as a module whose weights can be replaced for one call."""

    def __init__(self, walk: Walk[Any], layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._walk = layer, walk

    def forward(self, state: Any) -> Tensor:
        return self._walk.hidden(self._walk.run(self.layer, state))


def tune_layer(
    walk: Walk[Any], weights: LayerWeights, inputs: Sequence[Any], exact: Sequence[Any], seed: int = 0
) -> Sequence[Any]:
    """Tune the codes and scales of a rounded layer together, and keep them where they lower its error.

    Args:
        inputs: batches of what the layer reads.
        exact: the 16-bit model's output for each.
        seed: seed of the order in which batches are read.

    Returns:
        The layer's output for each, with the codes and scales that it has from now on.
    """
    rounded, before = _outputs(walk, weights.layer, inputs), {module: made for module, _, made, _ in weights.rounded()}
    if not before:
        return rounded
    latents = {module: _Latent(weight, made, scheme) for module, weight, made, scheme in weights.rounded()}
    targets = [walk.hidden(state) for state in exact]
    _descend(_Output(walk, weights.layer), weights, latents, inputs, targets, seed)
    for module, latent in latents.items():
        weights.take(module, latent.made())
    tuned = _outputs(walk, weights.layer, inputs)
    if _error(walk, tuned, targets) < _error(walk, rounded, targets):
        return tuned
    for module, made in before.items():
        weights.take(module, made)
    return rounded


def _outputs(walk: Walk[Any], layer: nn.Module, inputs: Sequence[Any]) -> Sequence[Any]:
    return [walk.run(layer, state) for state in inputs]


def _descend(
    output: _Output,
    weights: LayerWeights,
    latents: dict[str, _Latent],
    inputs: Sequence[Any],
    targets: Sequence[Tensor],
    seed: int,
) -> None:
    """Move the latents by Adam with a step that falls to zero; each step reads one batch, and none twice before all."""
    travels = {
        _CODE_TRAVEL: [latent.place for latent in latents.values()],
        _SCALE_TRAVEL: [latent.stretch for latent in latents.values()],
    }
    groups = [{"params": numbers, "lr": 2 * travel / _STEPS} for travel, numbers in travels.items()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / _STEPS)
    for batch in islice(_shuffled(len(inputs), seed), _STEPS):
        with torch.enable_grad():
            tried = {f"layer.{name}.weight": weights.in_order(name, latent()) for name, latent in latents.items()}
            lost = torch.func.functional_call(output, tried, (inputs[batch],)) - targets[batch]
            lost.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for latent in latents.values():
            latent.stay_in_range()
        falling.step()


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """Numbers below `count` in an order that is drawn anew each time all have come, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _error(walk: Walk[Any], outputs: Sequence[Any], targets: Sequence[Tensor]) -> float:
    pairs = zip(map(walk.hidden, outputs), targets, strict=True)
    return sum(float((output - target).square().sum()) for output, target in pairs)
