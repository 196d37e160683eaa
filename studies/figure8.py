"""Figure 8 of the paper, taken apart: when DIFF attention bears low-bit logits better than a Transformer.

    python -m studies.figure8 MODEL... -o FOLDER                      # KL over prose
    python -m studies.figure8 MODEL... -o FOLDER --needles 1          # KL of a needle's number

Of every model and scheme: KL from the model's own 16-bit logits, measured, and what a simple model predicts: for every
layer the mean square of a uniform error as wide as the scale times the KL that noise on that layer's logits costs. The
first is a matter of the logits' range, the second of how a model uses its maps, λ and norm; the DIFF that wins has a
product of both that is smaller. A file a model; those that are there are not measured again.

Source: arXiv 2410.05258, section 3.7.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.bench.environment import environment
from diffquant.evals.encoding import RequestEncoder
from diffquant.evals.protocols import needle
from diffquant.evals.stats import Estimate, estimate, paired_difference
from diffquant.loading import load
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from diffquant.source.source import open_source
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, progress_for, silent
from diffquant.text import corpus
from diffquant.text import tokens as token_ids
from diffquant.text.tokens import max_length
from studies.logit_noise import NOISES, Reading, divergences, layers_of, predictions_of, sensitivity

GRANULARITIES = "tensor,head,pair,row,tensor:alike,head:alike,row:alike,tensor:shift,row:shift"
WIDTHS = "8,6,4,3"
_BATCH = 16


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement: what is read, and the schemes whose KL is measured.

    Attributes:
        text: file of prose; some ships.
        characters: characters of the text that are read as prose.
        window: tokens of a sequence.
        needles: needles in a context, instead of prose.
        samples: needle contexts of each depth.
        bits, granularity: lists with commas; every width is combined with every granularity.
    """

    text: Path | None = None
    characters: int = 16384
    window: int = 256
    needles: int | None = None
    samples: int = 10
    bits: str = WIDTHS
    granularity: str = GRANULARITIES

    @property
    def schemes(self) -> list[Scheme]:
        return [
            Scheme.parse(f"{bits}:{granularity}")
            for granularity in self.granularity.split(",")
            for bits in self.bits.split(",")
        ]


def main(
    models: Annotated[list[Path], typer.Argument(help="Checkpoint folders or .gguf files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of a file a model, and plots.")],
    text: Annotated[Path | None, typer.Option(help="File of prose; some ships.")] = Settings.text,
    characters: Annotated[
        int, typer.Option(help="Characters of the text that are read as prose.")
    ] = Settings.characters,
    window: Annotated[int, typer.Option(help="Tokens of a sequence.")] = Settings.window,
    needles: Annotated[int | None, typer.Option(help="Needles in a context, instead of prose.")] = Settings.needles,
    samples: Annotated[int, typer.Option(help="Needle contexts of each depth.")] = Settings.samples,
    bits: Annotated[str, typer.Option(help="Widths, with commas.")] = Settings.bits,
    granularity: Annotated[str, typer.Option(help="Granularities, with commas.")] = Settings.granularity,
) -> None:
    """Take apart when DIFF attention bears low-bit logits better than a Transformer."""
    settings = Settings(text, characters, window, needles, samples, bits, granularity)
    results = [_result_of(model, output, settings) for model in models]
    print(figure8_summary(results))
    from studies.figure8_plots import write_plots

    write_plots(results, output)


def _result_of(model: Path, output: Path, settings: Settings) -> dict[str, Any]:
    file = output / f"{model.name}.json"
    if not file.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(measure_model(model, settings, progress_for(model.name)), indent=1) + "\n")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def measure_model(path: Path, settings: Settings, progress: Progress = silent) -> dict[str, Any]:
    """Content of one model's file."""
    source = open_source(path)
    model, tokenizer = load(source, dtype=torch.float32), source.tokenizer
    text = corpus.load_text(settings.text)
    if settings.needles:
        plan = needle.NeedlePlan(settings.needles, 1, (settings.window,), settings.samples)
        readings = needle_readings(model, tokenizer, text, plan)
        about: dict[str, Any] = {"needles": settings.needles, "samples": settings.samples}
    else:
        text = text[: settings.characters]
        readings = prose_readings(model, tokenizer, text, settings.window)
        about = {"characters": len(text)}
    return {
        "model": path.name,
        "generation": model.config.diff_spec.generation,
        "parameters": model.num_parameters(),
        "fingerprint": source.fingerprint,
        "reading": about | {"text": corpus.text_digest(text), "window": settings.window},
        "environment": environment(),
    } | analyse(model, readings, settings.schemes, progress)


def prose_readings(model: DiffTransformer, tokenizer: Any, text: str, window: int) -> list[Reading]:
    """Readings of windows that do not overlap; all tokens but each window's first are predicted."""
    ids = token_ids.encode_text(tokenizer, text, model.device)
    windows = ids[: len(ids) // (window + 1) * (window + 1)].view(-1, window + 1)
    return [Reading(batch, window) for batch in windows.split(_BATCH)]


def needle_readings(model: DiffTransformer, tokenizer: Any, text: str, plan: needle.NeedlePlan) -> list[Reading]:
    """Readings of needles' contexts and questions; the numbers are predicted."""
    encoder = RequestEncoder(tokenizer, max_length(model.config, tokenizer))
    items = needle.make_items(tokenizer, text, plan)
    requests = encoder.requests(request for item in items for request in item.requests())
    return [Reading(torch.tensor([ids.context + ids.continuation]), len(ids.continuation)) for ids in requests]


@torch.inference_mode()
def analyse(
    model: DiffTransformer, readings: Sequence[Reading], schemes: Sequence[Scheme], progress: Progress = silent
) -> dict[str, Any]:
    """Statistics of every layer's logits, what noise on them costs, and every scheme's KL by sequence."""
    model.apply_recipe(Recipe())
    exact = predictions_of(model, readings)
    nll = [float(x) for reading, logits in zip(readings, exact, strict=True) for x in reading.nll(logits)]
    layers = layers_of(model, readings, schemes)
    noises = list(NOISES.items())[: 1 if model.config.diff_spec.maps == 1 else None]
    for number, layer in enumerate(layers):
        layer["sensitivity"] = {name: sensitivity(model, readings, exact, number, shares) for name, shares in noises}
        progress(number + 1, len(layers) + len(schemes), "noise")
    kl = {}
    for number, scheme in enumerate(schemes):
        model.apply_recipe(Recipe(logits=scheme))
        kl[str(scheme)] = divergences(exact, predictions_of(model, readings))
        progress(len(layers) + number + 1, len(layers) + len(schemes), str(scheme))
    model.apply_recipe(Recipe())
    return {"nll": nll, "layers": layers, "kl": kl}


def predicted(result: Mapping[str, Any], scheme: str) -> float:
    """KL that the simple model predicts, in nats."""
    kl: float = sum(
        cost * size
        for layer in result["layers"]
        for cost, size in zip(costs(layer["sensitivity"], scheme), layer["errors"][scheme]["variance"], strict=True)
    )
    return kl


def costs(sensitivity: Mapping[str, float], scheme: str) -> list[float]:
    """Costs, in KL a unit of variance, of what a scheme rounds: the map, both maps, or their mean and half difference.

    KL is a quadratic form in the noise of both maps, which noise on each and on both determines: noise of
    opposite signs costs twice the sum of each less what the same noise on both does.
    """
    if len(sensitivity) == 1:
        return [sensitivity["first"]]
    apart = [sensitivity["first"], sensitivity["second"]]
    return [sensitivity["both"], 2 * sum(apart) - sensitivity["both"]] if scheme.endswith("alike") else apart


def advantage(diff: float, transformer: float) -> float:
    """Advantage in bits, which DIFF may do with less: one bit fewer is a scale twice as large and four times the KL."""
    return math.log2(transformer / diff) / 2


def parts(result: Mapping[str, Any], scheme: str) -> tuple[float, float]:
    """Factors of the simple model's KL: mean square of the error, as it weighs, and KL a unit of its variance."""
    cost = sum(sum(costs(layer["sensitivity"], scheme)) for layer in result["layers"])
    return predicted(result, scheme) / cost, cost


def mean_kl(result: Mapping[str, Any], scheme: str) -> Estimate:
    """Mean KL of a scheme over sequences, in nats."""
    return estimate(result["kl"][scheme])


def figure8_summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Text with every scheme's KL, measured and predicted, and each DIFF against the Transformer, if one is there."""
    lines = []
    for result in results:
        lines.append(
            f"{result['model']} ({result['generation']}), {estimate(result['nll']).mean:.3f} nats a token at 16 bits"
        )
        for scheme in result["kl"]:
            kl = mean_kl(result, scheme)
            lines.append(f"  {scheme:<15} {kl.mean:.2g} ± {kl.se or 0:.1g}  predicted {predicted(result, scheme):.2g}")
    plain = next((result for result in results if result["generation"] == "Transformer"), None)
    for result in results:
        if plain is not None and result is not plain:
            lines += [
                f"{result['model']} against {plain['model']}, bits it may do with less:",
                *_against(result, plain),
            ]
    return "\n".join(lines)


def _against(diff: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    lines = []
    for scheme in diff["kl"]:
        change = paired_difference(diff["kl"][scheme], plain["kl"][scheme])
        (size, cost), (plain_size, plain_cost) = parts(diff, scheme), parts(plain, scheme)
        measured = advantage(mean_kl(diff, scheme).mean, mean_kl(plain, scheme).mean)
        guess = advantage(predicted(diff, scheme), predicted(plain, scheme))
        lines.append(
            f"  {scheme:<15} {measured:+.2f}  predicted {guess:+.2f}"
            f" = range {advantage(size, plain_size):+.2f} and sensitivity {advantage(cost, plain_cost):+.2f};"
            f" KL {change.mean:+.2g} [{change.low:+.2g}, {change.high:+.2g}]"
        )
    return lines


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
