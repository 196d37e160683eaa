"""Figure 8 of the paper, taken apart: when DIFF attention bears low-bit logits better than a Transformer.

    python -m research.studies.figure8 MODEL... -o FOLDER                      # KL over prose
    python -m research.studies.figure8 MODEL... -o FOLDER --needles 1          # KL of a needle's number

Of every model and scheme: KL from the model's own 16-bit logits, measured, and what a simple model predicts: for every
layer the mean square of a uniform error as wide as the scale times the KL that noise on that layer's logits costs. The
first is a matter of the logits' range, the second of how a model uses its maps, λ and norm; the DIFF that wins has a
product of both that is smaller. Prose is read in a few windows from the middle of each of many passages, because
neighbouring windows are alike. A file a model; those that are there are not measured again.

Source: arXiv 2410.05258, section 3.7.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.checkpoints import texts
from diffquant.checkpoints import tokens as token_ids
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import max_length
from diffquant.errors import UsageError
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.protocols import needle
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.files import find_file_or_xz, write_json
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.figure8_model import figure8_summary
from research.studies.logit_noise import NOISES, Reading, divergences, layers_of, losses, predictions_of, sensitivity
from research.studies.results import read_json

GRANULARITIES = "tensor,map,head,pair,row,tensor:alike,head:alike,row:alike,tensor:shift,row:shift"
WIDTHS = "8,6,4,3"
_BATCH = 16
# The prose that ships is cut from four books in turn, as LICENSE-books.txt says.
_BOOKS = 4


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement: what is read, and the schemes whose KL is measured.

    Attributes:
        text: file of prose; some ships.
        passages: number of equal parts of the text, each read in its middle.
        windows: number of sequences that are read of each passage.
        window: tokens of a sequence.
        needles: needles in a context, instead of prose.
        samples: needle contexts of each depth.
        bits, granularity: lists with commas; every width is combined with every granularity.
    """

    text: Path | None = None
    passages: int = 16
    windows: int = 4
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
    passages: Annotated[
        int, typer.Option(help="Equal parts of the text, each read in its middle.")
    ] = Settings.passages,
    windows: Annotated[int, typer.Option(help="Sequences read of each passage.")] = Settings.windows,
    window: Annotated[int, typer.Option(help="Tokens of a sequence.")] = Settings.window,
    needles: Annotated[int | None, typer.Option(help="Needles in a context, instead of prose.")] = Settings.needles,
    samples: Annotated[int, typer.Option(help="Needle contexts of each depth.")] = Settings.samples,
    bits: Annotated[str, typer.Option(help="Widths, with commas.")] = Settings.bits,
    granularity: Annotated[str, typer.Option(help="Granularities, with commas.")] = Settings.granularity,
) -> None:
    """Take apart when DIFF attention bears low-bit logits better than a Transformer."""
    settings = Settings(text, passages, windows, window, needles, samples, bits, granularity)
    results = [_result_of(model, output, settings) for model in models]
    print(figure8_summary(results))
    from research.studies.figure8_plots import write_plots

    write_plots(results, output)


def _result_of(model: Path, output: Path, settings: Settings) -> dict[str, Any]:
    """A model's file, measured unless it is there.

    Raises:
        UsageError: the file is of another model, which had the same name.
    """
    file = output / f"{model.name}.json"
    if not find_file_or_xz(file).exists():
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, measure_model(model, settings, progress_for(model.name)))
    result: dict[str, Any] = read_json(file)
    if result["fingerprint"] != open_source(model).fingerprint:
        raise UsageError(f"{file} is of another model than {model}; name another folder with --output")
    return result


def measure_model(path: Path, settings: Settings, progress: Progress = report_nothing) -> dict[str, Any]:
    """Content of one model's file."""
    source = open_source(path)
    model, tokenizer = load(source, dtype=torch.float32), source.tokenizer
    text = texts.load_text(settings.text)
    if settings.needles:
        plan = needle.NeedlePlan(settings.needles, 1, (settings.window,), settings.samples)
        readings = needle_readings(model, tokenizer, text, plan)
        about: dict[str, Any] = {"needles": settings.needles, "samples": settings.samples}
    else:
        readings = prose_readings(model, tokenizer, text, settings)
        about = {"passages": settings.passages, "windows": settings.windows}
        about |= {} if settings.text else {"books": _BOOKS}
    return {
        "model": path.name,
        "generation": model.config.diff_spec.attention_name,
        "parameters": model.num_parameters(),
        "fingerprint": source.fingerprint,
        "reading": about | {"text": texts.text_digest(text), "window": settings.window},
        "environment": describe_environment(),
    } | analyse(model, readings, settings.schemes, progress)


def prose_readings(model: DiffTransformer, tokenizer: Any, text: str, settings: Settings) -> list[Reading]:
    """Readings of neighbouring windows from each passage's middle; all tokens but each window's first are predicted.

    Raises:
        UsageError: the passages are shorter than their windows.
    """
    length, count = len(text) // settings.passages, settings.windows * (settings.window + 1)
    middles = []
    for number in range(settings.passages):
        part = text[number * length : (number + 1) * length]
        ids = token_ids.encode_text(tokenizer, part, model.config.vocab_size, model.device)
        first = (len(ids) - count) // 2
        if first < 0:
            raise UsageError(
                f"passage {number} of {settings.passages} has {len(ids)} tokens; {settings.windows} windows of "
                f"{settings.window} take {count}: use fewer --passages, fewer --windows or a longer --text"
            )
        middles.append(ids[first : first + count].view(settings.windows, -1))
    return [Reading(batch, settings.window) for batch in torch.cat(middles).split(_BATCH)]


def needle_readings(model: DiffTransformer, tokenizer: Any, text: str, plan: needle.NeedlePlan) -> list[Reading]:
    """Readings of needles' contexts and questions; the numbers are predicted."""
    encoder = RequestEncoder(tokenizer, max_length(model.config, tokenizer), model.config.vocab_size)
    items = needle.make_items(tokenizer, text, plan)
    requests = encoder.encode_requests(request for item in items for request in item.query_texts())
    return [Reading(torch.tensor([ids.context + ids.continuation]), len(ids.continuation)) for ids in requests]


@torch.inference_mode()
def analyse(
    model: DiffTransformer, readings: Sequence[Reading], schemes: Sequence[Scheme], progress: Progress = report_nothing
) -> dict[str, Any]:
    """Statistics of every layer's logits, what noise on them costs, and every scheme's KL by sequence."""
    model.apply_recipe(Recipe())
    exact = predictions_of(model, readings)
    nll = losses(readings, exact)
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


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
