"""Figure 8 over several trainings: the bits that each DIFF may do with less than the Transformer of its own seed.

    python -m research.studies.figure8_seeds FOLDER... [--schemes 4:tensor,4:row]

Each folder holds what `figure8` measured of one seed: a Transformer and the DIFF models trained beside it.
Prints every model's perplexity at 16 bits and every scheme's bits, seed by seed, with their mean and Student's 95 %
interval: the trainings are the observations, so the interval is about another seed and not about another text. The bits
of the first scheme are split into range and sensitivity, as the simple model predicts them.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.errors import UsageError
from diffquant.evals.stats import mean_interval
from diffquant.report.tables import markdown
from diffquant.support.xz import named
from research.studies.figure8_model import bits_won, parts_won
from research.studies.results import read_json

SCHEMES = "4:tensor,4:head,4:row,4:row:shift,4:tensor:alike,4:head:alike,4:row:alike"
_PLAIN = "Transformer"

Result = Mapping[str, Any]
# What one seed's models are, by generation.
Seed = Mapping[str, Result]


def main(
    folders: Annotated[list[Path], typer.Argument(help="Folders of research.studies.figure8, one a seed.")],
    schemes: Annotated[str, typer.Option(help="Schemes, with commas.")] = SCHEMES,
) -> None:
    """Compare Figure 8 over seeds."""
    print(seeds_summary({folder.name: read_seed(folder) for folder in folders}, schemes.split(",")))


def read_seed(folder: Path) -> Seed:
    """Results of one seed's models, by generation.

    Raises:
        UsageError: there is no Transformer, or nothing to compare with it, or two models are of one generation.
    """
    results = [read_json(file) for file in named(folder, "*.json")]
    generations = [result["generation"] for result in results]
    if _PLAIN not in generations or len(generations) < 2 or len(set(generations)) < len(generations):
        raise UsageError(
            f"{folder} holds results of {', '.join(generations) or 'no model'}; a seed is one Transformer and one DIFF "
            "model of each generation, measured by research.studies.figure8"
        )
    return dict(zip(generations, results, strict=True))


def seeds_summary(seeds: Mapping[str, Seed], schemes: Sequence[str]) -> str:
    """Tables in Markdown of perplexity at 16 bits, and of the bits that each DIFF may do with less.

    Raises:
        UsageError: the seeds were measured on different texts, or one lacks a generation or a scheme.
    """
    _check(seeds, schemes)
    generations = list(next(iter(seeds.values())))
    perplexities = [
        [generation, *(f"{_perplexity(seed[generation]):.2f}" for seed in seeds.values())] for generation in generations
    ]
    lines = []
    for generation in generations:
        if generation == _PLAIN:
            continue
        for scheme in schemes:
            bits = [bits_won(seed[generation], seed[_PLAIN], scheme) for seed in seeds.values()]
            lines.append([generation, f"`{scheme}`", *_with_mean(bits)])
        splits = [parts_won(seed[generation], seed[_PLAIN], schemes[0]) for seed in seeds.values()]
        for name, part in zip(("range", "sensitivity"), zip(*splits, strict=True), strict=True):
            lines.append([generation, f"`{schemes[0]}`, {name}", *_with_mean(part)])
    names = list(seeds)
    tables = (
        markdown(["perplexity at 16 bits", *names], perplexities),
        markdown(["bits won", "logits", *names, "mean"], lines),
    )
    return "\n\n".join("\n".join(table) for table in tables)


def _with_mean(bits: Sequence[float]) -> list[str]:
    mean = mean_interval(bits)
    return [*(f"{each:+.2f}" for each in bits), f"{mean.mean:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]"]


def _perplexity(result: Result) -> float:
    return math.exp(sum(result["nll"]) / len(result["nll"]))


def _check(seeds: Mapping[str, Seed], schemes: Sequence[str]) -> None:
    (first, example), *others = seeds.items()
    for name, seed in others:
        if set(seed) != set(example):
            raise UsageError(f"{name} has {', '.join(seed)} where {first} has {', '.join(example)}")
    results = [(f"{name}, {generation}", result) for name, seed in seeds.items() for generation, result in seed.items()]
    if differing := [name for name, result in results if result["reading"] != example[_PLAIN]["reading"]]:
        raise UsageError(f"another text or other windows than {first}, {_PLAIN}: {'; '.join(differing)}")
    if lacking := [name for name, result in results if not set(schemes) <= set(result["kl"])]:
        raise UsageError(f"not all of {', '.join(schemes)} were measured: {'; '.join(lacking)}")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
