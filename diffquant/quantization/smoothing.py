"""Finds factors for the input channels of linear layers that reduce the error of rounding inputs or weights.

`convert --to smoothed` (for 8-bit inputs) and `--to scaled` (for 4-bit weights) divide each input channel by its
factor, in the norm or projection before the layer, and multiply the weights' columns. The factors are powers of two, so
that the model computes the same numbers in any dtype.

Sources: SmoothQuant, arXiv 2211.10438, equation 4, for inputs; AWQ, arXiv 2306.00978, section 3.2, for weights, and for
the search of the strength for each layer. AWQ's factors are not powers of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.checkpoints.building import build_model
from diffquant.checkpoints.calibration import read_calibration
from diffquant.checkpoints.compressed_tensors import decode_codes, weight_codes, weight_scale
from diffquant.checkpoints.conversions import NORM_BEFORE, SCALED, SMOOTHED
from diffquant.checkpoints.corpora import Sources
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.tokens import max_length
from diffquant.model.inputs import round_inputs
from diffquant.model.walk import split_into_batches
from diffquant.quantization.roundings.gptq.layer_inputs import collect_inputs, iterate_grouped_layers
from diffquant.recipe.numbers.sharing import Granularity
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress

_TOKENS, _WINDOW, _BATCH_TOKENS = 4096, 512, 2048
# Number of tokens on which strengths are compared; the largest magnitudes are those of all tokens.
_COMPARED = 512


@dataclass(frozen=True)
class _Goal:
    """What the factors are for.

    Attributes:
        strengths: strengths to choose from.
        weights: scheme of weights whose width its groups divide; others have a scale per row.
        inputs: scheme of inputs, or None if they are not rounded.
    """

    strengths: Sequence[float]
    weights: Scheme
    inputs: Scheme | None = None

    def scheme_of(self, weight: Tensor) -> Scheme:
        """Return the scheme of a weight [out, in]."""
        divides = weight.shape[1] % (self.weights.sharing.size or 1) == 0
        return self.weights if divides else replace(self.weights, sharing=Granularity("row"))


_GOALS = {
    SMOOTHED: _Goal((0.3, 0.4, 0.5, 0.6, 0.7, 0.8), Scheme.parse(8), Scheme.parse(8, "row", "activations")),
    SCALED: _Goal([number / 20 for number in range(1, 21)], Scheme.parse("4:g32")),
}


@torch.no_grad()
def find_factors(
    source: Source, target: str, text: Sources, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Find the factors that divide the inputs of each layer's linear modules, on a text.

    Args:
        target: "smoothed" or "scaled".

    Returns:
        Factors and a record of the text. The factors are powers of two, float64 [channels], by the name of the norm or
        projection whose output they divide. An input is left out if no factors reduce its error.

    Raises:
        DiffQuantError: the checkpoint, its tokenizer or the text cannot be read.
    """
    tokenizer, config = source.tokenizer, source.architecture
    window = min(_WINDOW, max_length(config, tokenizer))
    calibration = read_calibration(text, tokenizer, config, window, _TOKENS)
    model = build_model(source, torch.float32)
    runner = model.new_layer_runner(window)
    states = [runner.embed(batch) for batch in split_into_batches(calibration.ids, _BATCH_TOKENS)]
    factors: dict[str, Tensor] = {}
    for number, (layer, groups) in enumerate(iterate_grouped_layers(model, calibration.ids)):
        predecessors = {names[0]: before for names in groups if (before := _predecessor(names)) is not None}
        inputs: dict[str, list[Tensor]] = {name: [] for name in predecessors}
        for place, state in enumerate(states):
            seen, states[place] = collect_inputs(runner, layer, list(inputs), state)
            for name, x in seen.items():
                inputs[name].append(x)
        for names in (names for names in groups if names[0] in inputs):
            weights = [layer.get_submodule(name).weight for name in names]
            if (found := _search(torch.cat(inputs[names[0]]), weights, _GOALS[target])) is not None:
                factors[f"model.layers.{number}.{predecessors[names[0]]}"] = found
        progress(number + 1, len(runner.layers), f"layers {target}")
    return factors, calibration.record


def _predecessor(names: Sequence[str]) -> str | None:
    """Return the norm or projection whose output is the input of these modules, or None if heads lie between."""
    part = names[0].rpartition(".")[2]
    return "mlp.up_proj" if part == "down_proj" else NORM_BEFORE.get(part)


def _search(x: Tensor, weights: Sequence[nn.Parameter], goal: _Goal) -> Tensor | None:
    """Return the factors [in] with the least error of rounded products x·Wᵀ, or None if it is least without factors.

    Args:
        x: inputs [N, in] in float32.
        weights: weights [out, in] that multiply them.
    """
    of_inputs = (x.abs().amax(0) if goal.inputs else x.abs().mean(0)).double()
    of_weights = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).double()
    some = x[:: max(1, len(x) // _COMPARED)]
    exact = [some @ weight.mT for weight in weights]
    best, least = None, _error(some, weights, exact, torch.ones_like(of_inputs), goal)
    for strength in goal.strengths:
        factors = _powers_of_two(of_inputs, of_weights, strength, 1 - strength if goal.inputs else 0.0)
        if (error := _error(some, weights, exact, factors, goal)) < least:
            best, least = factors, error
    return best


def _powers_of_two(of_inputs: Tensor, of_weights: Tensor, strength: float, of_weight: float) -> Tensor:
    """Return |x|^strength / max|W|^of_weight, rounded to powers of two around 1; 1 for a channel of zeros."""
    exponent = strength * of_inputs.log2() - of_weight * of_weights.log2()
    used = (of_inputs > 0) & (of_weights > 0)
    middle = exponent[used].median() if used.any() else 0.0
    # Within this range no float16 or bfloat16 weight of ordinary size becomes zero or infinite.
    return torch.where(used, (exponent - middle).round().clamp(-6, 6), 0.0).exp2()


def _error(x: Tensor, weights: Sequence[nn.Parameter], exact: Sequence[Tensor], factors: Tensor, goal: _Goal) -> float:
    """Return the summed squared error of products with rounded inputs and weights, given exact ones."""
    divided = x / factors.float()
    rounded = round_inputs(divided, goal.inputs) if goal.inputs else divided
    total = 0.0
    for weight, product in zip(weights, exact, strict=True):
        scaled, scheme = weight * factors.float(), goal.scheme_of(weight)
        codes = weight_codes(scaled, scale := weight_scale(scaled, scheme), scheme)
        total += float((rounded @ decode_codes(codes, scale, scheme).mT - product).square().sum())
    return total
