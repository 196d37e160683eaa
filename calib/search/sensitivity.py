"""Sensitivity of units: how much rounding one unit changes the model's predictions."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from diffquant.calib.search.result import Width
from diffquant.calib.search.units import Unit, quantize_unit
from diffquant.errors import NonFiniteError
from diffquant.model.causal import CausalModel
from diffquant.support.names import option_name


class OneDnnProducts(TorchFunctionMode):
    """A context in which `linear` uses oneDNN for float32 on the CPU without gradients.

    oneDNN sums in another order than torch does otherwise, so results may differ in the last bits.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and not torch.is_grad_enabled() and all(map(_is_suitable, args)):
            args = [x if x is None else x.to_mkldnn() for x in args]
            return func(*args).to_dense()
        return func(*args, **(kwargs or {}))


def _is_suitable(x: Tensor | None) -> bool:
    """Return whether oneDNN supports this argument of `linear`."""
    return x is None or (
        x.device.type == "cpu" and x.dtype == torch.float32 and x.layout == torch.strided and x.numel() > 0
    )


# Largest number of the 16-bit model's log-probabilities in memory: 128 MB.
_EXPECTED_ENTRIES = 1 << 25
# Number of positions compared at once, small enough for a CPU's cache.
_POSITIONS = 16


class Sensitivity:
    """Measures how much rounding a single unit changes a model's predictions on N windows of T tokens.

    It keeps each layer's input from one forward pass of the 16-bit model, so that a measurement computes only the
    unit's layer and later ones. It also keeps the model's log-probabilities at evenly spaced positions.

    Attributes:
        model: 16-bit model.
        positions: indices of those positions among all N·T tokens, int64.
        seconds: duration of one forward pass.
    """

    def __init__(self, model: CausalModel, ids: Tensor) -> None:
        """Run the model on the windows once.

        Args:
            model: 16-bit model; a measurement changes it temporarily.
            ids: token ids [N, T] of N windows.

        Raises:
            NonFiniteError: the model computes NaN or infinity.
        """
        started = time.monotonic()
        self.model = model
        self.positions = torch.arange(0, ids.numel(), -(-ids.numel() * model.config.vocab_size // _EXPECTED_ENTRIES))
        self._walk = model.new_layer_runner(ids.shape[1])
        self._inputs: list[Any] = []
        with torch.inference_mode(), OneDnnProducts():
            x = self._walk.embed(ids)
            for layer in self._walk.layers:
                self._inputs.append(x)
                x = self._walk.run_layer(layer, x)
            self._expected = self._logits(x).log_softmax(-1)
        self.seconds = time.monotonic() - started
        if not torch.isfinite(self._expected).all():
            raise NonFiniteError(f"the model computes NaN or infinity; use {option_name('dtype', 'float32')}")

    @torch.inference_mode()
    def measure_cost(self, unit: Unit, width: Width) -> float:
        """Measure the cost of rounding only this unit, by a forward pass from the unit's layer on.

        Returns:
            The mean KL(16-bit model || rounded model) of the next-token distributions, in nats.
        """
        with OneDnnProducts():
            with quantize_unit(self.model, unit, width):
                x = self._walk.run_layer(self._walk.layers[unit.layer], self._inputs[unit.layer])
            for layer in self._walk.layers[unit.layer + 1 :]:
                x = self._walk.run_layer(layer, x)
            return max(self._kl(self._logits(x)), 0.0)

    def _logits(self, x: Any) -> Tensor:
        hidden = self._walk.decoder.normalize(self._walk.hidden_states(x)).flatten(0, 1)[self.positions]
        return linear(hidden, self.model.lm_head.weight).float()

    def _kl(self, logits: Tensor) -> float:
        """Return the mean KL(16 bits || these logits) over the compared positions, in nats."""
        divergences = [
            (p.exp() * (p - q.log_softmax(-1))).sum(-1)
            for p, q in zip(self._expected.split(_POSITIONS), logits.split(_POSITIONS), strict=True)
        ]
        return float(torch.cat(divergences).double().mean())
