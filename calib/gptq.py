"""Error-compensated rounding: what a column loses is put on the columns after it, weighed by the inputs' products.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from diffquant.checkpoint.load import check_device, load, load_tokenizer
from diffquant.checkpoint.reader import open_checkpoint
from diffquant.checkpoint.rounding import Rounding, clipped, clipped_scale, row_scheme
from diffquant.evals.perplexity import identity, load_text
from diffquant.model.adapters import adapter_for
from diffquant.model.modeling import DiffLayer
from diffquant.numerics import quantize
from diffquant.progress import Progress, silent
from diffquant.scheme import Recipe, Scheme

from .text import token_windows
from .walk import Walk, batches

# Share of the mean diagonal that is added to it, so that inputs that never vary do not make it singular.
_DAMPING = 0.01
# Columns that are updated at once where one scale serves a whole row.
_BLOCK = 128


def gptq(
    path: Path,
    text: Path | None = None,
    tokens: int = 16384,
    window: int = 512,
    device: str = "cpu",
    progress: Progress = silent,
) -> Rounding:
    """Rounding for one checkpoint, from its own inputs over a text.

    Holds a factor [in, in] of every linear layer's inputs.

    Raises:
        DiffQuantError: the checkpoint or the text cannot be read, or the text holds no window.
    """
    check_device(device)
    words = load_text(text)
    model = load(path, Recipe(), torch.float32, device)
    ids = token_windows(model, load_tokenizer(path), words, window, tokens)
    adapter = adapter_for(open_checkpoint(path).config)
    factors: dict[str, Tensor] = {}
    with torch.inference_mode():
        walk = Walk.over(model, window)
        states = [walk.embed(batch) for batch in batches(ids, 4096)]
        for number, layer in enumerate(walk.layers):
            with _products(layer) as products:
                states = [walk.run(layer, x) for x in states]
            shared = {id(product): factor(product.cpu()) for product in products.values()}
            for name, product in products.items():
                factors[adapter.source_name(f"model.layers.{number}.{name}.weight")] = shared[id(product)]
            progress(number + 1, len(walk.layers), "reading inputs")

    def compensated(name: str, values: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # A head that an override names lies outside the layers.
        return (
            compensate(values, factors[name], scheme, dtype)
            if name in factors
            else clipped(name, values, scheme, dtype)
        )

    return Rounding("gptq", compensated, {"text": identity(words), "tokens": ids.numel(), "window": window})


def factor(product: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of XᵀX [in, in], damped."""
    damped = product.double()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean() + 1e-12
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()


def compensate(values: Tensor, factor: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of some rows.

    Args:
        values: [rows, in] float32.
        factor: as `factor` gives it, [in, in].
        scheme: granularity row or group.
        dtype: of the stored scale.

    Returns:
        int8 [rows, in], and the scale [rows, in/g] or [rows, 1].
    """
    weight, width = values.clone(), values.shape[1]
    whole = clipped_scale(weight, row_scheme(scheme), dtype) if scheme.size is None else None
    found, scales = torch.empty_like(values, dtype=torch.int8), []
    for start in range(0, width, scheme.size or _BLOCK):
        end = min(start + (scheme.size or _BLOCK), width)
        scale = clipped_scale(weight[:, start:end], row_scheme(scheme), dtype) if whole is None else whole
        lost = torch.empty(len(values), end - start)
        for column in range(start, end):
            kept = weight[:, column : column + 1]
            code = quantize(kept, scale.float(), scheme.bits)
            found[:, column : column + 1] = code
            lost[:, column - start : column - start + 1] = error = (kept - code * scale.float()) / factor[
                column, column
            ]
            weight[:, column + 1 : end] -= error * factor[column, column + 1 : end]
        weight[:, end:] -= lost @ factor[start:end, end:]
        scales.append(scale)
    return found, torch.cat(scales, 1) if whole is None else whole


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
