"""Gradient descent on all codes and scales of a layer's weights, to reproduce the 16-bit layer's output.

Source: Cheng et al., SignRound, arXiv 2309.05516, which AutoRound implements: rounding depends on a parameter with a
straight-through gradient. SignRound starts from the nearest codes. This method starts from gptq's codes, does not
bound the scales, and uses Adam instead of the gradient's sign.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.model.walk import LayerRunner
from diffquant.quantization.roundings.gptq.layer_inputs import StoredActivations
from diffquant.quantization.roundings.gptq.sequence import LayerWeights, Made, States
from diffquant.recipe.numbers.formats import NumberFormat
from diffquant.recipe.scheme import Scheme

_STEPS = 150
# Approximate total change of a parameter whose gradient never changes sign: one code, or a quarter of a scale.
_CODE_TRAVEL, _SCALE_TRAVEL = 1.0, 0.25
# Maximum initial distance from the code, in codes; at 0.5 the first step would change the code.
_FARTHEST_START = 0.3


class _Ladder:
    """Maps continuous codes of a format to levels, and gradients by level to gradients by code.

    Attributes:
        first, last: lowest and highest code.
    """

    def __init__(self, number_format: NumberFormat, scale: Tensor) -> None:
        """Prepare for a weight whose scales [out, in/g] share the steps of `scale`, if the format has steps."""
        levels, self._sizes = number_format.levels, (-1, number_format.scales_per_step)
        self._format = number_format.with_fitted_step(scale.unflatten(1, self._sizes), -1)
        self.first = -number_format.zero_index
        self.last = self.first + len(levels) - 1
        # Change of the level per code; for uneven levels, half the distance between both neighbours.
        around = torch.tensor((2 * levels[0] - levels[1], *levels, 2 * levels[-1] - levels[-2]))
        self._steps = None if number_format.has_integer_levels else (around[2:] - around[:-2]) / 2

    def levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes, which are whole numbers in float32."""
        return codes if self._steps is None else self._format.levels_of(codes.to(torch.int8), codes.dtype)

    def per_code_(self, values: Tensor, codes: Tensor) -> Tensor:
        """Convert derivatives by level into derivatives by code, in place."""
        return values if self._steps is None else values.mul_(self._steps[codes.int() - self.first])

    def storable(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return scales [out, in/g] rounded as stored."""
        return self._format.round_scale(scale.unflatten(1, self._sizes), dtype).flatten(1)

    def approximate(self, scale: Tensor) -> Tensor:
        """Return scales rounded as stored if they are stored in 8 bits; the rounding to 16 bits is ignored."""
        is_coarse = self._format.stored_scale_dtype(scale.dtype).itemsize == 1
        return self.storable(scale, scale.dtype) if is_coarse else scale


class _Rounded(torch.autograd.Function):
    """Computes a weight from continuous codes and scales, with straight-through gradients.

    The operations are fused, since a layer's weights exceed the CPU cache and each operation would read them again.
    """

    @staticmethod
    def forward(ctx: Any, place: Tensor, stretch: Tensor, scale: Tensor, ladder: _Ladder) -> Tensor:
        codes, stretched = place.round(), ladder.approximate(scale * (1 + stretch))
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
    """Return values [out, in] as [out, in/g, g], for a scale [out, in/g]."""
    parted: Tensor = values.unflatten(1, (scale.shape[1], -1))
    return parted


def _times(values: Tensor, scale: Tensor) -> Tensor:
    """Multiply values [out, in] by their scales [out, in/g]."""
    return (_by_scale(values, scale) * scale[..., None]).flatten(1)


class _Latent(nn.Module):
    """A weight's codes and scales as trainable parameters.

    Attributes:
        place: continuous codes [out, in], which are rounded; initialized near gptq's codes, towards the 16-bit weight.
        stretch: relative change of each scale, [out, in/g] or [out, 1].
    """

    def __init__(self, weight: Tensor, made: Made, scheme: Scheme) -> None:
        super().__init__()
        codes, scale = made[0].float(), made[1]
        self._dtype, self._scale = scale.dtype, scale.float()
        self._ladder = _Ladder(scheme.format, self._scale)
        away = _times(weight, 1 / self._scale) - self._ladder.levels(codes)
        # A group of zeros may have scale 0.
        away.div_(self._ladder.per_code_(torch.ones_like(away), codes)).nan_to_num_(0, 0, 0)
        self.place = nn.Parameter(codes + away.clamp(-_FARTHEST_START, _FARTHEST_START))
        self.stretch = nn.Parameter(torch.zeros_like(self._scale))
        self.stay_in_range()

    def forward(self) -> Tensor:
        """Return the dequantized weight [out, in], with straight-through gradients."""
        weight: Tensor = _Rounded.apply(self.place, self.stretch, self._scale, self._ladder)
        return weight

    def stay_in_range(self) -> None:
        """Clamp continuous codes to the range that rounds to the lowest or highest code."""
        self.place.data.clamp_(self._ladder.first - _FARTHEST_START, self._ladder.last + _FARTHEST_START)

    def to_codes(self) -> Made:
        """Return int8 codes and the scale as stored."""
        return self.place.round().to(torch.int8), self._ladder.storable(self._scale * (1 + self.stretch), self._dtype)


class _Output(nn.Module):
    """Module that returns a layer's output hidden states, for use with `torch.func.functional_call`."""

    def __init__(self, runner: LayerRunner[Any], layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._runner = layer, runner

    def forward(self, state: Any) -> Tensor:
        return self.hidden(self._runner.run_layer(self.layer, state))

    def hidden(self, state: Any) -> Tensor:
        return self._runner.hidden_states(state)


def tune_layer(weights: LayerWeights, states: States, exact: States, seed: int = 0) -> None:
    """Tune the codes and scales of a rounded layer together, and keep the result if it lowers the layer's error.

    Args:
        weights: weights of the layer, with codes and scales.
        states: inputs of the layer, one item per batch; replaced by its outputs with the final codes and scales.
        exact: outputs of the layer in the 16-bit model, one item per batch.
        seed: seed of the order of batches.
    """
    before = {module: made for module, _, made, _ in weights.rounded_modules()}
    if not before:
        weights.run_layer(states)
        return
    of_rounded = sum(error for _, error in _outputs(weights, states, exact))
    latents = {module: _Latent(weight, made, scheme) for module, weight, made, scheme in weights.rounded_modules()}
    _descend(weights, latents, states, exact, seed)
    for module, latent in latents.items():
        weights.set_rounded(module, latent.to_codes())
    tuned, of_tuned = list[StoredActivations[Any]](), 0.0
    for output, error in _outputs(weights, states, exact):
        tuned.append(weights.store.keep(output))
        of_tuned += error
    if of_tuned < of_rounded:
        states[:] = tuned
        return
    del tuned
    for module, made in before.items():
        weights.set_rounded(module, made)
    weights.run_layer(states)


def _outputs(weights: LayerWeights, states: States, exact: States) -> Iterator[tuple[Any, float]]:
    """Yield a layer's output and its squared error for each batch."""
    runner = weights.runner
    for state, target in zip(states, exact, strict=True):
        output = runner.run_layer(weights.layer, state.get())
        yield output, float((runner.hidden_states(output) - runner.hidden_states(target.get())).square().sum())


def _descend(weights: LayerWeights, latents: dict[str, _Latent], states: States, exact: States, seed: int) -> None:
    """Train the latents by Adam with a learning rate that decays linearly to zero, one shuffled batch per step."""
    output = _Output(weights.runner, weights.layer)
    travels = {
        _CODE_TRAVEL: [latent.place for latent in latents.values()],
        _SCALE_TRAVEL: [latent.stretch for latent in latents.values()],
    }
    groups = [{"params": numbers, "lr": 2 * travel / _STEPS} for travel, numbers in travels.items()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / _STEPS)
    for batch in islice(_shuffle(len(states), seed), _STEPS):
        state, target = states[batch].get(), output.hidden(exact[batch].get())
        with torch.enable_grad():
            tried = {f"layer.{name}.weight": weights.reorder(name, latent()) for name, latent in latents.items()}
            lost = torch.func.functional_call(output, tried, (state,)) - target
            lost.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for latent in latents.values():
            latent.stay_in_range()
        falling.step()


def _shuffle(count: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `count` forever, reshuffled after each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
