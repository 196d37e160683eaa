"""The Linears of a module, made of its block's table."""

from torch import nn

from diffquant.model.blocks import Block


def add_linears(module: nn.Module, block: Block) -> None:
    """Give a module a Linear for each matrix of its block that can be packed, in the block's order."""
    parameters = block.parameters()
    for name, parameter in parameters.items():
        child = name.removesuffix(".weight")
        if child != name and len(parameter.shape) == 2 and parameter.packing != "never":
            out, width = parameter.shape
            module.add_module(child, nn.Linear(width, out, bias=f"{child}.bias" in parameters))
