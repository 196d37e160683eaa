"""KL of quantized weights with and without rotations of the residual stream and of values within heads.

    python -m research.studies.rotated MODEL --json research/results/rotated/MODEL.json
    python -m research.studies.rotated --show research/results/rotated/*.json

`convert --to rotated` makes a checkpoint that computes the same function, in float32 and in bfloat16. It and the source
are quantized to `4:g32` (if 32 divides every width), `4:row` and `3:row`, each by `mse` and `gptq`; embedding, head,
norms and λ stay as they are. The reference of every KL is the source at 16 bits, run in float32. Scored are the second
half of the bundled prose, of which gptq reads the beginning, and HellaSwag's contexts, which no rule reads. The
comparison is the change of KL from the source's weights to the rotated ones in float32, over the same windows of 256
tokens. bfloat16 is measured to choose the dtype in which `convert` writes rotated weights. Each result is on disk
before the next is measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from diffquant.checkpoints.source import Source, open_source
from diffquant.errors import UsageError
from diffquant.measure.stats import Difference
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.reports.tables import markdown
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.kv_results import TEXTS, KVResults, kl_change, references_of, scores_of, settings_of, texts_of
from research.studies.results import read_json

SOURCE, ROTATED, NARROW = "source", "rotated", "rotated, bfloat16"
_GROUPS, _SCHEMES = "4:g32", ("4:row", "3:row")
_WINDOW = 256


def main(
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint folder or a .gguf file; with --show, results.")],
    characters: Annotated[int, typer.Option(help="Characters that are scored of either text.")] = 24576,
    rules: Annotated[str, typer.Option(help="Rounding rules, with commas.")] = "mse,gptq",
    file: Annotated[Path | None, typer.Option("--json", help="Where the numbers are and go.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Compare quantized weights with and without rotations."""
    if show:
        print(rotated_table([read_json(path) for path in paths]))
        return
    if len(paths) != 1 or file is None:
        raise UsageError("give one model and --json, or --show and results")
    file.parent.mkdir(parents=True, exist_ok=True)
    measured = measure_rotations(paths[0], rules.split(","), characters, file, progress_for("rotated"))
    print(rotated_table([measured]))


def measure_rotations(
    path: Path, rules: Sequence[str], characters: int, file: Path, progress: Progress = report_nothing
) -> dict[str, Any]:
    """Score the source's and the rotated weights under each recipe, writing the file after each.

    Args:
        rules: rounding rules.
        characters: number of characters of either text.

    Raises:
        UsageError: the file holds results of another model or text.
    """
    source, texts = open_source(path), texts_of(characters)
    results = KVResults(file, settings_of(source, texts, characters, window=_WINDOW))
    todo = [each for each in _cells(source, rules) if name_of(*each) not in results.rows]
    with TemporaryDirectory() as folder:
        sources = {SOURCE: source}
        for name, dtype in ((ROTATED, torch.float32), (NARROW, torch.bfloat16)):
            convert(source, Path(folder) / name, "rotated", dtype=dtype, progress=report_nothing)
            sources[name] = open_source(Path(folder) / name)
        exact = TorchModel(load(source, Recipe(), torch.float32, "cpu"), source.tokenizer)
        references = references_of(exact, texts, _WINDOW)
        for number, (which, scheme, rule) in enumerate(todo):
            progress(number, len(todo), name_of(which, scheme, rule))
            recipe = Recipe.of(weights=scheme, rounding=rule)
            model = TorchModel(load(sources[which], recipe, torch.float32, "cpu"), source.tokenizer)
            results.add(name_of(which, scheme, rule), scores_of(model, texts, _WINDOW, references))
    return results.to_dict()


def name_of(which: str, scheme: str, rule: str) -> str:
    """Name of a result."""
    return f"{which}, {scheme} by {rule}"


def _cells(source: Source, rules: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """List weights, scheme and rounding rule of each result; those at 16 bits show the cost of rotating itself."""
    yield from ((which, "16", "nearest") for which in (ROTATED, NARROW))
    widths = {shape[-1] for shape in source.architecture.linear_shapes().values()}
    has_groups = all(width % 32 == 0 for width in widths)
    for scheme in (*((_GROUPS,) if has_groups else ()), *_SCHEMES):
        yield from ((which, scheme, rule) for rule in rules for which in (SOURCE, ROTATED))
        yield NARROW, scheme, rules[0]


def change(result: Mapping[str, Any], scheme: str, rule: str, text: str, which: str = ROTATED) -> Difference:
    """Return the change of KL from the source's weights to rotated ones, over the same windows."""
    ours, plain = (result["results"][name_of(each, scheme, rule)][text] for each in (which, SOURCE))
    return kl_change(ours, plain)


def compared(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the schemes and rules of a model's results."""
    begin = f"{SOURCE}, "
    names = [name.removeprefix(begin) for name in result["results"] if name.startswith(begin)]
    return [(scheme, rule) for scheme, _, rule in (name.partition(" by ") for name in names)]


def rotated_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a row for each model, scheme and rule: both KLs, their change's interval, and bfloat16's KL."""
    heads = ["model", "weights", *(f"{text}: KL, nats" for text in TEXTS), f"{TEXTS[1]}: rotated in bfloat16"]
    rows = [
        [
            result["settings"]["model"],
            f"{scheme} by {rule}",
            *(_change_cell(result, scheme, rule, text) for text in TEXTS),
            _narrow_cell(result, scheme, rule),
        ]
        for result in results
        for scheme, rule in compared(result)
    ]
    return "\n".join(markdown(heads, rows))


def _change_cell(result: Mapping[str, Any], scheme: str, rule: str, text: str) -> str:
    plain, ours = (result["results"][name_of(which, scheme, rule)][text]["kl"] for which in (SOURCE, ROTATED))
    found = change(result, scheme, rule, text)
    return f"{plain:.4f} → {ours:.4f} ({found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}])"


def _narrow_cell(result: Mapping[str, Any], scheme: str, rule: str) -> str:
    found = result["results"].get(name_of(NARROW, scheme, rule))
    return "-" if found is None else f"{found[TEXTS[1]]['kl']:.4f}"


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
