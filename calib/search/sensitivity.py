"""The cost of a unit's width: at its attention's output, after the subtraction and the norm, and at the model's."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from diffquant.calib.search.products import OneDnnProducts
from diffquant.calib.search.units import Unit, unit_at_width
from diffquant.calib.search.widths import Width
from diffquant.errors import NonFiniteError
from diffquant.model.causal import CausalModel
from diffquant.support.spelling import spelled

# Entries of the 16-bit model's log-probabilities in memory: 128 MB.
_EXPECTED_ENTRIES = 1 << 25
# Positions compared at once: few enough for a CPU's cache.
_POSITIONS = 16


@dataclass(frozen=True)
class Cost:
    """The cost of one unit at one width.

    Attributes:
        kl: mean KL(16 bits || this) of the next-token distributions, in nats.
        attention: relative RMS error of the output projection's input, or None if the unit comes after it.
    """

    kl: float
    attention: float | None


class Sensitivity:
    """A model's reading of some windows, kept so that a change in a layer runs only what comes after it.

    Holds every layer's input, [N, T, D] each or what else goes between layers, and log-probabilities at evenly spread
    positions.

    Attributes:
        model: 16-bit model.
        positions: positions whose distributions are compared.
        seconds: duration of one pass over the model.
    """

    def __init__(self, model: CausalModel, ids: Tensor) -> None:
        """Read the windows once.

        Args:
            model: 16-bit model, which a measurement changes and restores.
            ids: [N, T] windows.

        Raises:
            NonFiniteError: the model computes NaN or infinity.
        """
        started = time.monotonic()
        self.model = model
        self.positions = torch.arange(0, ids.numel(), -(-ids.numel() * model.config.vocab_size // _EXPECTED_ENTRIES))
        self._walk = model.walk(ids.shape[1])
        self._inputs: list[Any] = []
        self._attention: list[Tensor | None] = []
        with torch.inference_mode(), OneDnnProducts():
            x = self._walk.embed(ids)
            for layer in self._walk.layers:
                self._inputs.append(x)
                x, attention = self._run_watched(layer, x)
                self._attention.append(attention)
            self._expected = self._logits(x).log_softmax(-1)
        self.seconds = time.monotonic() - started
        if not torch.isfinite(self._expected).all():
            raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}")

    @torch.inference_mode()
    def cost_of(self, unit: Unit, width: Width) -> Cost:
        """The cost of a unit at a width, from a run that begins at the unit's layer."""
        with OneDnnProducts():
            with unit_at_width(self.model, unit, width):
                x, attention = self._run_watched(self._walk.layers[unit.layer], self._inputs[unit.layer])
            for layer in self._walk.layers[unit.layer + 1 :]:
                x = self._walk.run(layer, x)
            logits = self._logits(x)
        wanted = self._attention[unit.layer] if unit.in_attention else None
        error = relative_rms(attention, wanted) if attention is not None and wanted is not None else None
        return Cost(max(self._kl(logits), 0.0), error)

    def _run_watched(self, layer: nn.Module, x: Any) -> tuple[Any, Tensor | None]:
        """A layer's output, and the input of its attention's output projection, if it has attention."""
        inputs: list[Tensor] = []
        output = self._walk.attention_output(layer)
        if output is None:
            return self._walk.run(layer, x), None
        hook = output.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            return self._walk.run(layer, x), inputs[0]
        finally:
            hook.remove()

    def _logits(self, x: Any) -> Tensor:
        norm = self.model.model.get_submodule(self.model.model.architecture.final_norm[0])
        hidden = norm(self._walk.hidden(x)).flatten(0, 1)[self.positions]
        return linear(hidden, self.model.lm_head.weight).float()

    def _kl(self, logits: Tensor) -> float:
        """Mean KL(16 bits || these logits) over the compared positions."""
        divergences = [
            (p.exp() * (p - q.log_softmax(-1))).sum(-1)
            for p, q in zip(self._expected.split(_POSITIONS), logits.split(_POSITIONS), strict=True)
        ]
        return float(torch.cat(divergences).double().mean())


def relative_rms(got: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference over that of `wanted`."""
    error = (got.double() - wanted.double()).square().sum()
    return float((error / wanted.double().square().sum().clamp(min=1e-300)).sqrt())
