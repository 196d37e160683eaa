"""Gradient descent on the codes and scales of a layer's weights, all at once, towards the 16-bit layer's output.

Source: Cheng et al., SignRound, arXiv 2309.05516, which AutoRound implements: what decides a code's rounding is a
parameter, through which gradients pass unchanged. It starts from the nearest codes; this one starts from gptq's, with
scales that may move freely, and Adam in place of the gradient's sign.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.model.walk import Walk
from diffquant.numerics import max_code
from diffquant.quantization.roundings.gptq.sequence import LayerWeights, Made
from diffquant.quantization.roundings.mse import lowest_code, storable
from diffquant.scheme import Scheme

_STEPS = 200
# About how far the steps take a number that always goes one way: a code by one, a scale by a quarter of it.
_CODE_TRAVEL, _SCALE_TRAVEL = 1.0, 0.25
# How far from its code a weight may start, in codes; one at 0.5 would change its code in the first step.
_FARTHEST_START = 0.3


class _Latent(nn.Module):
    """A weight's codes and scale as numbers that can descend.

    Attributes:
        shift: what is added to each code before it is rounded again, [out, in]; it starts where the 16-bit weight is.
        stretch: change of each scale as a share of it, [out, in/g] or [out, 1].
    """

    def __init__(self, weight: Tensor, made: Made, scheme: Scheme) -> None:
        super().__init__()
        codes, scale = made
        self._bits, self._size, self._dtype = scheme.bits, scheme.size or codes.shape[1], scale.dtype
        self._codes, self._scale = codes.float(), scale.float()
        away = weight / self._scale.repeat_interleave(self._size, 1) - self._codes
        self.shift = nn.Parameter(away.clamp(-_FARTHEST_START, _FARTHEST_START))
        self.stretch = nn.Parameter(torch.zeros_like(self._scale))

    def forward(self) -> Tensor:
        """The weight [out, in], whose gradient passes through rounding."""
        exact = self._codes + self.shift
        codes = self._in_range(exact + (exact.round() - exact).detach())
        weight: Tensor = (codes.unflatten(1, (-1, self._size)) * self._stretched()[..., None]).flatten(1)
        return weight

    def made(self) -> Made:
        """Codes int8 and scale as they are stored."""
        codes = self._in_range((self._codes + self.shift).round())
        return codes.to(torch.int8), storable(self._stretched(), self._bits, self._dtype)

    def _stretched(self) -> Tensor:
        return self._scale * (1 + self.stretch)

    def _in_range(self, codes: Tensor) -> Tensor:
        return codes.clamp(lowest_code(self._bits), max_code(self._bits))


class _Output(nn.Module):
    """A layer's hidden states, as a module whose weights can be replaced for one call."""

    def __init__(self, walk: Walk[Any], layer: nn.Module) -> None:
        super().__init__()
        self.layer, self._walk = layer, walk

    def forward(self, state: Any) -> Tensor:
        return self._walk.hidden(self._walk.run(self.layer, state))


def tune_layer(walk: Walk[Any], weights: LayerWeights, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Tune the codes and scales of a rounded layer together, and keep them where they lower its error.

    Args:
        inputs: batches of what the layer reads.
        outputs: the 16-bit model's output for each.
    """
    before = {module: made for module, _, made, _ in weights.rounded()}
    if not before:
        return
    latents = {module: _Latent(weight, made, scheme) for module, weight, made, scheme in weights.rounded()}
    output, targets = _Output(walk, weights.layer), [walk.hidden(state) for state in outputs]
    least = _error(output, inputs, targets)
    _descend(output, weights, latents, inputs, targets)
    for module, latent in latents.items():
        weights.take(module, latent.made())
    if not _error(output, inputs, targets) < least:
        for module, made in before.items():
            weights.take(module, made)


def _descend(
    output: _Output,
    weights: LayerWeights,
    latents: dict[str, _Latent],
    inputs: Sequence[Any],
    targets: Sequence[Tensor],
) -> None:
    """Move the latents by Adam with a step that falls to zero; each step reads one batch."""
    travels = {
        _CODE_TRAVEL: [latent.shift for latent in latents.values()],
        _SCALE_TRAVEL: [latent.stretch for latent in latents.values()],
    }
    groups = [{"params": numbers, "lr": 2 * travel / _STEPS} for travel, numbers in travels.items()]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / _STEPS)
    generator = torch.Generator().manual_seed(0)
    for batch in torch.randint(len(inputs), (_STEPS,), generator=generator).tolist():
        with torch.enable_grad():
            tried = {f"layer.{name}.weight": weights.in_order(name, latent()) for name, latent in latents.items()}
            lost = torch.func.functional_call(output, tried, (inputs[batch],)) - targets[batch]
            lost.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        falling.step()


def _error(output: _Output, inputs: Sequence[Any], targets: Sequence[Tensor]) -> float:
    return sum(float((output(state) - target).square().sum()) for state, target in zip(inputs, targets, strict=True))
