"""A layer of a SambaY model, and the state passed between layers."""

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import LayerNorm

from diffquant.model.activations import activation_named
from diffquant.model.decoder import DecoderLayer
from diffquant.model.linears import add_linears
from diffquant.model.sambay.attention import KeysValues
from diffquant.model.sambay.blocks import FusedMLPBlock
from diffquant.model.sambay.mamba import GatedMemory, Mamba
from diffquant.model.sambay.reading import SambaYReading


@dataclass(frozen=True)
class Flow:
    """The state passed between layers.

    Attributes:
        x: residual stream [B, T, D], in float32 at least.
        memory: output of the last Mamba layer's scan, [B, T, E]; None before that layer.
        shared: keys and values that the last attention read, which cross attention reads again.
    """

    x: Tensor
    memory: Tensor | None = None
    shared: KeysValues | None = None


class SambaYMLP(nn.Module):
    """A gated network whose gate and value lie in one weight, the gate first."""

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(self, block: FusedMLPBlock) -> None:
        super().__init__()
        add_linears(self, block)
        self.activate = activation_named(block.activation).compute

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(value * self.activate(gate))
        return out


class SambaYLayer(DecoderLayer):
    """A mixer of one of the kinds and a gated network, each behind its norm and added to the residual.

    The residual stays in float32 where the parameters are of a half type, as it does behind Mamba in the reference.
    """

    attn: nn.Module
    mlp: nn.Module
    input_layernorm: LayerNorm
    post_attention_layernorm: LayerNorm

    def forward(self, flow: Flow, reading: SambaYReading) -> Flow:
        mixed, flow = self._mix(self.mixer_input(flow.x), flow, reading)
        x = flow.x + mixed
        x = x + self.mlp(normed(self.post_attention_layernorm, x))
        return replace(flow, x=x)

    def mixer_input(self, x: Tensor) -> Tensor:
        """The mixer's input, [B, T, D] in the parameters' dtype."""
        return normed(self.input_layernorm, x)

    def _mix(self, x: Tensor, flow: Flow, reading: SambaYReading) -> tuple[Tensor, Flow]:
        """The mixer's output [B, T, D], and the flow with what it leaves to later layers."""
        if isinstance(self.attn, Mamba):
            states = None if reading.cache is None else reading.cache.recurrent(self.layer)
            mixed, memory = self.attn(x, reading.packing, states)
            return mixed, replace(flow, memory=memory)
        if isinstance(self.attn, GatedMemory):
            return self.attn(x, flow.memory), flow
        mixed, shared = self.attn(x, reading, flow.shared)
        return mixed, replace(flow, shared=shared)


def normed(norm: LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of a residual [B, T, D], in the norm's own dtype."""
    out: Tensor = norm(x.to(norm.weight.dtype))
    return out
