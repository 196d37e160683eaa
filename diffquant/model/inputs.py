"""Rounds the inputs of Linears while a model runs, like dynamic `input_activations` of compressed-tensors.

Each token, or each group of its channels, has a scale. An integer of b bits uses all codes from -2^(b-1) to
2^(b-1) - 1, and its scale is the largest magnitude over (2^b - 1) / 2. (Elsewhere in diffquant the divisor is the
largest code.) So transformers and diffquant compute the same from a folder.

Source: compressed-tensors 0.20, quantization/utils/helpers.py, calculate_qparams; lifecycle/forward_helpers.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme


def round_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """Round inputs x [..., K] to the levels of a scheme's format, in x's dtype.

    Args:
        scheme: scheme with granularity row (one scale per token) or group; K must be a multiple of the group size.
    """
    levels = scheme.format
    view, dim = scheme.sharing.view(x)
    largest = view.abs().amax(dim, keepdim=True)
    if levels.block:
        scale = levels.scale_for_largest(largest)
    else:
        scale = largest / ((levels.largest - levels.lowest) / 2)
        scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    ratio = (view / scale).clamp_(levels.lowest, levels.largest)
    return (levels.round_to_absmax_levels_(ratio) * scale).reshape(x.shape)


class InputRounding:
    """A hook that rounds a module's input before its forward, and counts its calls."""

    def __init__(self, module: nn.Module, scheme: Scheme) -> None:
        self.scheme, self.calls = scheme, 0
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:  # noqa: ARG002
        self.calls += 1
        return (round_inputs(inputs[0], self.scheme),)

    def remove(self) -> None:
        """Leave the module's inputs unrounded from now on."""
        self._handle.remove()


def add_input_rounding(model: nn.Module, linears: Mapping[str, str], recipe: Recipe) -> dict[str, InputRounding]:
    """Make a model round the inputs of its Linears from now on, as a recipe's `activations` require.

    Args:
        model: model that contains the Linears.
        linears: checkpoint names of the Linears with quantized weights, by their names in the model.
        recipe: recipe of the model.

    Returns:
        The hook of each module whose inputs are rounded, by its name in the model.

    Raises:
        UsageError: activations are to be rounded but no weights are quantized, or gate and up projection are joined
            into one module and have different schemes.
    """
    if recipe.quantizes_any("activations") and not linears:
        raise UsageError(
            "activations are the inputs of Linears with quantized weights, and this model has none: load its "
            "checkpoint with weights and activations in one recipe"
        )
    modules = dict(model.named_modules())
    schemes: dict[str, Scheme] = {}
    for name, stored in linears.items():
        own = name if name in modules else f"{name.rpartition('.')[0]}.gate_up_proj"
        scheme = recipe.input_scheme(stored)
        if schemes.setdefault(own, scheme) != scheme:
            raise UsageError(f"{own} has one input, but the recipe has two schemes for it; load with packed=False")
    return {name: InputRounding(modules[name], scheme) for name, scheme in schemes.items() if scheme.quantizes}
