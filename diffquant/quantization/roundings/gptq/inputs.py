"""Rounding that knows the checkpoint's own inputs: a run over a text, and what `compensation` makes of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor, nn

from diffquant.calib.compensation import Inputs, compensate, damped
from diffquant.loading import load
from diffquant.model.modeling import DiffLayer
from diffquant.model.walk import Walk, batches
from diffquant.quantization.rounding import Rounding, clipped
from diffquant.scheme import Recipe, Scheme
from diffquant.source.source import Source, open_source
from diffquant.support.devices import check_device
from diffquant.support.progress import Progress, silent
from diffquant.text.corpus import identity, load_text
from diffquant.text.tokens import max_length, token_windows

# Of the text that is read by default.
TOKENS = 16384


def gptq(
    path: Path | Source,
    text: Path | None = None,
    tokens: int = TOKENS,
    window: int = 512,
    device: str = "cpu",
    progress: Progress = silent,
) -> Rounding:
    """Rounding for one checkpoint, from its own inputs over a text.

    Holds XᵀX [in, in] of every linear layer's inputs X, once where layers share them.

    Args:
        window: tokens the model sees at once; its context, where that is shorter.

    Raises:
        DiffQuantError: the checkpoint or the text cannot be read, or the text holds no window.
    """
    check_device(device)
    words = load_text(text)
    source = open_source(path)
    model = load(source, Recipe(), torch.float32, device)
    tokenizer = source.tokenizer
    window = min(window, tokens, max_length(model.config, tokenizer))
    ids = token_windows(model, tokenizer, words, window, tokens)
    adapter = source.adapter
    products: dict[str, Tensor] = {}
    with torch.inference_mode():
        walk = Walk.over(model, window)
        states = [walk.embed(batch) for batch in batches(ids, 4096)]
        for number, layer in enumerate(walk.layers):
            with _products(layer) as summed:
                states = [walk.run(layer, x) for x in states]
            shared = {id(product): damped(product.cpu()) for product in summed.values()}
            for name, product in summed.items():
                products[adapter.source_name(f"model.layers.{number}.{name}.weight")] = shared[id(product)]
            progress(number + 1, len(walk.layers), "reading inputs")

    # Blocks of one weight, and weights with the same inputs, follow one another.
    inputs, guard = lru_cache(maxsize=4)(Inputs.of), Lock()

    def compensated(name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # A head that an override names lies outside the layers.
        if name not in products:
            return clipped(name, values, scheme, dtype)
        with guard:
            known = inputs(products[name])
        return compensate(values, known, scheme, dtype)

    return Rounding("gptq", compensated, {"text": identity(words), "tokens": ids.numel(), "window": window})


@contextmanager
def _products(layer: DiffLayer) -> Iterator[Mapping[str, Tensor]]:
    """XᵀX of every linear layer's inputs [N, in] by name, summed while the body runs; equal inputs share one."""
    products: dict[str, Tensor] = {}
    modules = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    owners = dict.fromkeys((f"self_attn.{name}" for name in ("k_proj", "v_proj", "lambda_proj")), "self_attn.q_proj")
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
