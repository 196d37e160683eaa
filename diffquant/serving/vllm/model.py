"""Models of the family for vLLM: Llama's decoder around differential attention."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from diffquant.errors import UsageError
from diffquant.model.activations import POLY_NORM_EPS
from diffquant.quantization.modeling_diffquant import DiffConfig
from diffquant.serving.vllm.attention import ServedAttention
from diffquant.serving.vllm.config import row_orders, warn_of_ignored_schemes

# vLLM's names of activations, by diffquant's.
_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh"}


class PolyNormAndMul(nn.Module):
    """Activation of a gated MLP: PolyNorm of the first half of the channels (gate) times the second half (up).

    PolyNorm's means are over the gate's channels of all tensor-parallel ranks.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32), requires_grad=False)

    def forward(self, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, -1)
        wide = gate.float()
        powers = torch.stack([wide**3, wide**2, wide], -2)
        squares = tensor_model_parallel_all_reduce(powers.square().sum(-1))
        normed = powers * torch.rsqrt(squares / self.channels + POLY_NORM_EPS).unsqueeze(-1)
        return (self.weight @ normed + self.bias).to(gate.dtype) * up


class DiffMLP(nn.Module):
    """A gated MLP of vLLM's parallel Linears: down(act(gate(x)) · up(x))."""

    def __init__(self, config: DiffConfig, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        made_of = {"bias": config.mlp_bias, "quant_config": quant_config, "return_bias": False}
        self.gate_up_proj = MergedColumnParallelLinear(width, [inner] * 2, prefix=f"{prefix}.gate_up_proj", **made_of)
        self.down_proj = RowParallelLinear(inner, width, prefix=f"{prefix}.down_proj", **made_of)
        act = config.hidden_act
        self.act_fn = PolyNormAndMul(inner) if act == "poly_norm" else get_act_and_mul_fn(_ACTIVATIONS.get(act, act))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out


class DiffDecoderLayer(LlamaDecoderLayer):
    """vLLM's Llama layer with `ServedAttention` and `DiffMLP`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: DiffConfig | None = None) -> None:
        # Llama's __init__ would build its own attention and MLP.
        nn.Module.__init__(self)
        config = config or vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.hidden_size = config.hidden_size
        self.self_attn = ServedAttention(config, vllm_config.cache_config, quant_config, f"{prefix}.self_attn")
        self.mlp = DiffMLP(config, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DiffForCausalLM(LlamaForCausalLM):
    """A causal language model with vLLM's Llama decoder and differential (or plain) attention.

    Raises:
        UsageError: the number of tensor-parallel ranks would split head pairs; or LoRA is enabled on several ranks for
            a checkpoint with all signal heads before all noise heads, since its projections are reordered for the
            ranks, but those of adapters are not.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        self.row_orders = row_orders(config.diff_model["attention"], get_tensor_model_parallel_world_size())
        if self.row_orders and vllm_config.lora_config is not None:
            raise UsageError(
                f"{config.model_type} has all signal heads first, so LoRA adapters to it need a single rank"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=DiffDecoderLayer)
        warn_of_ignored_schemes(vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights(self._reorder_rows(weights))
        return loaded

    def _reorder_rows(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors with rows in the order of the ranks, in the dtype they are kept in."""
        dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        for name, tensor in weights:
            order = self.row_orders.get(name.rsplit(".", 2)[-2])
            moves = order is not None and not name.endswith("weight_shape")
            # vLLM would also convert them, but with a warning for each.
            yield name, (tensor[order] if moves else tensor).to(dtypes.get(name, tensor.dtype))
