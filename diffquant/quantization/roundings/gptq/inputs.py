"""The inputs of a checkpoint's linear layers, as their products XᵀX, from a run of the 16-bit model over a text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffquant.model.walk import batches
from diffquant.quantization.roundings.gptq.compensation import damped
from diffquant.source.building import build_model
from diffquant.source.source import Source
from diffquant.support.progress import Progress
from diffquant.text.tokens import max_length, token_windows

_BATCH_TOKENS = 4096


@dataclass(frozen=True, eq=False)
class LayerProducts:
    """Second moments of the linear layers' inputs X, from a run over a text.

    Attributes:
        products: damped XᵀX [in, in] of each weight's inputs, by the checkpoint's own names; one tensor where
            layers share their inputs.
        tokens: number of tokens that were read.
        window: number of tokens that the model saw at once.
    """

    products: Mapping[str, Tensor]
    tokens: int
    window: int


def layer_products(source: Source, text: str, tokens: int, window: int, progress: Progress) -> LayerProducts:
    """Run the 16-bit model over a text, in float32 and layer by layer.

    It runs on the CPU whatever the model is loaded on later, so that every reader of a recipe gets the same codes.

    Args:
        tokens: number of tokens of the text that are read, at most.
        window: number of tokens that the model sees at once; its context, where that is shorter.

    Raises:
        DiffQuantError: the checkpoint or its tokenizer cannot be read, or the text holds no window.
    """
    adapter, tokenizer = source.adapter, source.tokenizer
    model = build_model(source, torch.float32)
    window = min(window, tokens, max_length(model.config, tokenizer))
    ids = token_windows(model, tokenizer, text, window, tokens)
    products: dict[str, Tensor] = {}
    with torch.inference_mode():
        walk = model.walk(window)
        states = [walk.embed(batch) for batch in batches(ids, _BATCH_TOKENS)]
        for number, layer in enumerate(walk.layers):
            with _summed_products(layer) as summed:
                states = [walk.run(layer, x) for x in states]
            shared = {id(product): damped(product) for product in summed.values()}
            for name, product in summed.items():
                products[adapter.source_name(f"model.layers.{number}.{name}.weight")] = shared[id(product)]
            progress(number + 1, len(walk.layers), "reading inputs")
    return LayerProducts(products, ids.numel(), window)


@contextmanager
def _summed_products(layer: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """XᵀX of every linear layer's inputs [N, in] by name, summed while the body runs; equal inputs share one."""
    products: dict[str, Tensor] = {}
    modules = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    owners = dict.fromkeys(
        (f"self_attn.{name}" for name in ("k_proj", "v_proj", "lambda_proj", "output_gate_proj")), "self_attn.q_proj"
    )
    owners = {name: owner for name, owner in (owners | {"mlp.up_proj": "mlp.gate_proj"}).items() if name in modules}

    def add(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2)
        products[name] = products.get(name, torch.zeros(())) + rows.mT @ rows

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, module in modules.items()
        if name not in owners
    ]
    try:
        yield products
        products |= {name: products[owner] for name, owner in owners.items()}
    finally:
        for hook in hooks:
            hook.remove()
