"""Cost of quantized weights to a layer's output: signal over noise on a model's own inputs, by kind of weight.

    python -m research.studies.rounding_layers MODEL --json research/results/rounding/layers.json

A model's weights say little about others': those of a GGUF file lie on a 4-bit grid already. Here the inputs are
the model's own, over the second half of a text (gptq reads others, over the first), and the weights are its own
or random: normal, heavy-tailed, with columns or rows ten times as large.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from diffquant.bench.environment import environment
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.roundings import Rounder
from diffquant.quantization.roundings.gptq.compensation import Inputs, compensate, damped
from diffquant.recipe import Recipe
from diffquant.report.tables import markdown
from diffquant.source.source import open_source
from diffquant.support.files import write_json
from diffquant.support.progress import Progress, progress_for, silent
from diffquant.text.corpus import load_text
from diffquant.text.tokens import encode_text
from research.studies.model_reading import ModelReading
from research.studies.quantizers import METHODS
from research.studies.rounding_method import Method, reason

_LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
_WINDOW = 512
_OUTLIERS, _FACTOR = 0.01, 10.0


@dataclass(frozen=True)
class LayerOptions:
    """Options of a measurement.

    Attributes:
        layers: numbers of the layers whose inputs are taken.
        rows: number of rows of each weight.
        read: number of tokens that gptq reads.
        scored: number of tokens over which outputs are compared.
    """

    layers: tuple[int, ...]
    rows: int = 128
    read: int = 4096
    scored: int = 1024


@dataclass(frozen=True)
class Layer:
    """A linear layer: its inputs [N, in] over either half, and rows of its weight [rows, in]."""

    read: Tensor
    scored: Tensor
    weight: Tensor


# `tuned` rounds the weights of a decoder layer together, so a weight alone says nothing of it.
LAYER_METHODS = tuple(method for method in METHODS if not method.name.startswith("tuned"))


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder or a .gguf file.")],
    file: Annotated[Path, typer.Option("--json", help="Where to write the numbers.")],
    layers: Annotated[str, typer.Option(help="Layers whose inputs are taken, with commas.")] = "0,11,29",
) -> None:
    """Measure what quantized weights cost a layer's output on a model's own inputs."""
    options = LayerOptions(tuple(int(layer) for layer in layers.split(",")))
    result = measure_layers(model, options, LAYER_METHODS, progress_for("layers"))
    write_json(file, result)
    print(layer_table(result))


def measure_layers(
    path: Path, options: LayerOptions, methods: Sequence[Method], progress: Progress = silent
) -> dict[str, Any]:
    """Signal over noise of each method on each kind of weight, in decibels."""
    layers_by_name = linear_layers(path, options)
    rows: dict[str, dict[str, Any]] = {}
    for number, method in enumerate(methods):
        progress(number, len(methods), method.name)
        try:
            rows[method.name] = _of_method(method, layers_by_name)
        except Exception as error:
            if method.package is None:
                raise
            rows[method.name] = {"missing": reason(error, method)}
    progress(len(methods), len(methods), "done")
    return {
        "environment": environment(*sorted({method.package for method in methods if method.package})),
        "settings": {
            "model": path.name,
            "layers": list(options.layers),
            "linears": list(_LINEARS),
            "rows": options.rows,
            "read": options.read,
            "scored": options.scored,
        },
        "results": rows,
    }


def linear_layers(path: Path, options: LayerOptions) -> dict[str, Layer]:
    """Linear layers by name."""
    source, text = open_source(path), load_text()
    model, tokenizer = load(source, Recipe(), torch.float32), source.tokenizer
    names = [f"model.layers.{layer}.{linear}" for layer in options.layers for linear in _LINEARS]
    halves = text[: len(text) // 2], text[len(text) // 2 :]
    read, scored = (
        _inputs(model, encode_text(tokenizer, half, model.config.vocab_size, model.device)[:count], names)
        for half, count in zip(halves, (options.read, options.scored), strict=True)
    )
    return {
        name: Layer(read[name], scored[name], model.get_parameter(f"{name}.weight")[: options.rows].half().float())
        for name in names
    }


@torch.inference_mode()
def _inputs(model: DiffTransformer, ids: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Inputs [N, in] of each linear layer, by name."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2))
        )
        for name in names
    ]
    for window in ids.split(_WINDOW):
        model.model(input_ids=window[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def _of_method(method: Method, layers_by_name: dict[str, Layer]) -> dict[str, Any]:
    """Bits a weight of a method, and its decibels by kind of weight, the mean over layers."""
    bits = elements = 0
    decibels: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, layer in layers_by_name.items():
        # No rule that is compared here asks for more of a model.
        quantize = method.over(cast(ModelReading, SimpleNamespace(rounder=_compensation(layer))))
        for kind, make in KINDS.items():
            weight = make(layer.weight, torch.Generator().manual_seed(0)).half()
            made = quantize(name, weight)
            output = layer.scored @ weight.float().T
            error = output - layer.scored @ made.values.T
            decibels[kind].append(10 * math.log10(float(output.square().sum() / error.square().sum())))
            bits, elements = bits + made.bits, elements + weight.numel()
    return {"bits": bits / elements, "decibels": {kind: sum(values) / len(values) for kind, values in decibels.items()}}


def _compensation(layer: Layer) -> Callable[..., Rounder]:
    """Maker of gptq for one layer, from the inputs it may read."""

    @cache
    def inputs() -> Inputs:
        return Inputs.of(damped(layer.read.T @ layer.read))

    return lambda *_: Rounder(lambda _, values, scheme, dtype: compensate(values, inputs(), scheme, dtype))


def _normal(weight: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(weight.shape, generator=generator) * weight.std()


def _student(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Weight of Student's t with five degrees of freedom."""
    spread = torch.randn(5, *weight.shape, generator=generator).square().mean(0).sqrt()
    return _normal(weight, generator) / spread


def _with_large(dim: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    def make(weight: Tensor, generator: torch.Generator) -> Tensor:
        count = weight.shape[dim]
        large = torch.randperm(count, generator=generator)[: max(1, round(_OUTLIERS * count))]
        return _normal(weight, generator).index_copy(
            dim, large, _FACTOR * _normal(weight, generator).index_select(dim, large)
        )

    return make


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "the model's own": lambda weight, generator: weight,
    "normal": _normal,
    "Student's t, 5": _student,
    "normal, large columns": _with_large(1),
    "normal, large rows": _with_large(0),
}


def layer_table(result: dict[str, Any]) -> str:
    """Markdown with a row for each method and a column for each kind of weight."""
    rows = []
    for name, row in result["results"].items():
        numbers = (
            [f"not measured: {row['missing']}", *["-"] * len(KINDS)]
            if "missing" in row
            else [f"{row['bits']:.3f}", *(f"{row['decibels'][kind]:.2f}" for kind in KINDS)]
        )
        rows.append([name, *numbers])
    return "\n".join(markdown(["method", "bits", *KINDS], rows))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
