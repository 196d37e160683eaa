"""The reference of a model with Mamba's states and shared keys, whose layers take more than the state before them."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from diffquant.export.verification.caches import GrowingCache, Past, StaticCache
from diffquant.export.verification.reference import Reference
from diffquant.family.mask import Mask
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.model.sambay.cache import RecurrentLayer, SambaYCache
from diffquant.model.sambay.layer import Flow, SambaYLayer, normed
from diffquant.model.sambay.reading import SambaYReading


class StateReference(Reference):
    """The torch twin of an exported SambaY.

    A layer's memory and shared keys are those that the stages before it left in the same pass, of the states that they
    were given.
    """

    _flow: Flow | None = None

    @torch.no_grad()
    def stage(self, number: int, x: Tensor, first: int = 0) -> Tensor:
        # Nothing is remembered and nothing left out: a state depends on every token before it.
        return self._computed(number, x, ())[0][:, first:]

    def _final_norm(self, x: Tensor) -> Tensor:
        return normed(cast(nn.LayerNorm, self.model.model.final_layernorm), x)

    def _layer_output(self, number: int, x: Tensor, cached: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:  # noqa: ARG002  stages keep nothing
        layer = cast(SambaYLayer, self.model.model.layers[number])
        window = cast(SambaYArchitecture, self.model.model.architecture).sliding_window
        cache = _LayerCache(self._cache, self._reading.past, len(x))
        reading = SambaYReading(Mask(None), Mask(None, window), 0, cast(SambaYCache, cache))
        before = Flow(x) if number == 0 or self._flow is None else self._flow
        parts: list[Flow] = []
        begin, length = 0, x.shape[1]
        for chunk in x.split(list(self._reading.calls) or length, 1):
            end = begin + chunk.shape[1]
            parts.append(layer(_part(before, chunk, slice(begin, end), length), reading))
            begin = end
        memory = [part.memory for part in parts if part.memory is not None]
        output = torch.cat([part.x for part in parts], 1)
        self._flow = Flow(output, torch.cat(memory, 1) if memory else None, parts[-1].shared)
        return output, ()

    def _with_disturbed(self, output: Any, size: float) -> Any:
        if isinstance(output, Flow):
            return Flow(super()._with_disturbed(output.x, size), output.memory, output.shared)
        return super()._with_disturbed(output, size)


class _LayerCache(GrowingCache):
    """A cache of one layer, whichever it is: keys and values, or a state.

    Attributes:
        state: what a layer of Mamba keeps.
    """

    def __init__(self, static: StaticCache | None, past: Past | None, batch: int) -> None:
        super().__init__(static, past)
        self.state = RecurrentLayer()
        if past is not None and past.states is not None:
            self.state.write(*(x.expand(batch, -1, -1) for x in past.states))

    def recurrent(self, _layer: int) -> RecurrentLayer:
        return self.state


def _part(flow: Flow, x: Tensor, tokens: slice, length: int) -> Flow:
    """What a layer gets for some of the tokens that a pass reads, with the keys and values up to them."""
    memory = None if flow.memory is None else flow.memory[:, tokens]
    shared = flow.shared
    if shared is not None:
        hidden = length - tokens.stop
        keys, values = (rows[:, :, : rows.shape[2] - hidden] for rows in shared)
        shared = keys, values
    return Flow(x, memory, shared)
