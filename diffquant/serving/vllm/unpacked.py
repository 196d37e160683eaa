"""Packed weights of any width on a CPU, where vLLM's own kernels support only 4 bits.

They are unpacked when they are loaded, and from then on take as much memory as 16- or 32-bit weights. If the folder
rounds inputs, so does this kernel; vLLM's own kernel for 4 bits on a CPU does not.
"""

import torch
from torch import nn
from torch.nn.functional import linear
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum

from diffquant.model.inputs import round_inputs
from diffquant.recipe.numbers.packing import unpack
from diffquant.recipe.scheme import Scheme


class UnpackedLinearKernel(MPLinearKernel):
    """A matmul kernel that unpacks weights once, when they are loaded.

    It supports compressed-tensors' pack-quantized layout without zero points.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.zero_points:
            return False, "UnpackedLinearKernel has no zero points"
        # vLLM's 4-bit kernel claims to support float32, and CPUs without AVX-512; either fails at the first request.
        others = [kernel for kernel in _kernels() if kernel is not cls and kernel.can_implement(c)[0]]
        if others and c.act_type != torch.float32 and hasattr(torch.ops._C, "cpu_gemm_wna16"):
            return False, f"{others[0].__name__} multiplies packed weights, so they need not be unpacked"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        words, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        width = self.config.partition_weight_shape[0]
        codes = unpack(words.data, self.config.weight_type.size_bits, width).unflatten(1, (scale.shape[1], -1))
        weight = (codes * scale.data.float().unsqueeze(2)).flatten(1).to(self.config.act_type)
        replace_parameter(layer, self.w_q_name, nn.Parameter(weight, requires_grad=False))

    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # vLLM's name of what its scheme read from the folder, for the kernel that GPUs have.
        if (inputs := getattr(layer, "_humming_input_quant_config", None)) is not None:
            shared = f"g{inputs['group_size']}" if inputs["group_size"] else "row"
            x = round_inputs(x, Scheme.parse(f"{inputs['num_bits']}:{shared}"))
        return linear(x, getattr(layer, self.w_q_name), bias)


def register_kernel() -> None:
    """Register `UnpackedLinearKernel` for CPUs, before vLLM's own kernels.

    It declines formats that those support, so vLLM still uses them where it can.
    """
    if UnpackedLinearKernel not in _kernels():
        _kernels().insert(0, UnpackedLinearKernel)


def _kernels() -> list[type[MPLinearKernel]]:
    # vLLM's function for this appends, so the kernel that wrongly claims float32 would come first.
    kernels: list[type[MPLinearKernel]] = _POSSIBLE_KERNELS[PlatformEnum.CPU]
    return kernels
