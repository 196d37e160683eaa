"""Cost of quantized weights to a model: our roundings beside bitsandbytes, torchao and HQQ at equal bits.

    python -m studies.rounding MODEL --json bench/results/rounding/MODEL.json
    python -m studies.rounding --show bench/results/rounding/*.json

Every method quantizes the weights of the same linear layers, rounded to float16 first, and the model runs in
float32 on what it gives back; embedding, head, norms and λ stay as they are. The text's first half is what gptq
reads, its second what is scored. Each result is on the disk before the next is measured: started again, the
program measures what is missing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.bench.environment import environment
from diffquant.errors import UsageError
from diffquant.evals.stats import estimate
from diffquant.report.tables import markdown
from diffquant.support.files import write_atomically
from diffquant.support.progress import Progress, progress_for, silent
from studies.quantizers import METHODS, PACKAGES, Method
from studies.rounded_model import RoundingOptions, Subject

FORMAT = 1
FULL = "16 bits"


def main(
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint folder or a .gguf file; with --show, results.")],
    text: Annotated[Path | None, typer.Option(help="In place of the prose that ships.")] = RoundingOptions.text,
    characters: Annotated[
        int, typer.Option(help="Characters of the second half that are scored.")
    ] = RoundingOptions.characters,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = RoundingOptions.window,
    tokens: Annotated[int, typer.Option(help="Tokens that gptq reads.")] = RoundingOptions.tokens,
    items: Annotated[int, typer.Option(help="Items of HellaSwag; 0 for none.")] = RoundingOptions.items,
    only: Annotated[str, typer.Option(help="Parts of methods' names, with semicolons; all by default.")] = "",
    file: Annotated[Path | None, typer.Option("--json", help="Where the numbers are and go.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Compare what our roundings, bitsandbytes, torchao and HQQ cost a model at equal bits."""
    if show:
        print(method_table(*map(read_result, paths)))
        return
    if len(paths) != 1 or file is None:
        raise UsageError("give one model and --json, or --show and results")
    options = RoundingOptions(text, characters, window, tokens, items)
    print(method_table(measure_methods(paths[0], options, chosen(only), file, progress_for("rounding"))))


def chosen(parts: str) -> list[Method]:
    """Methods whose names contain one of the parts.

    Raises:
        UsageError: no name contains one of the parts.
    """
    wanted = [part.strip() for part in parts.split(";") if part.strip()]
    unknown = [part for part in wanted if not any(part in method.name for method in METHODS)]
    if unknown:
        known = "; ".join(method.name for method in METHODS)
        raise UsageError(f"no method is called {', '.join(map(repr, unknown))}; known are {known}")
    return [method for method in METHODS if not wanted or any(part in method.name for part in wanted)]


def measure_methods(
    path: Path, options: RoundingOptions, methods: Sequence[Method], file: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Measure every method, writing the file after each.

    Raises:
        UsageError: the file is another run's, or the text's first half is too short for gptq.
    """
    subject = Subject(path, options)
    result = _begin(file, subject.settings())
    todo = [None, *methods]
    for number, method in enumerate(todo):
        name = method.name if method else FULL
        former = result["results"].get(name, {})
        if subject.lacking(former):
            progress(number, len(todo), name)
            result["results"][name] = subject.measured(method, former) | {"made_by": _maker(method)}
            write_atomically(file, json.dumps(result, indent=1) + "\n")
    progress(len(todo), len(todo), "done")
    return result


def _begin(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Result that the file holds already, or the beginning of one.

    Raises:
        UsageError: the file holds something else.
    """
    fresh = {"format": FORMAT, "environment": environment(*PACKAGES), "settings": settings, "results": {}}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    former = read_result(file)
    if former["settings"] != settings:
        raise UsageError(f"{file} holds results of another model, text or setting; name another file with --json")
    return fresh | {"results": former["results"]}


def read_result(file: Path) -> dict[str, Any]:
    """Result that this program wrote.

    Raises:
        UsageError: the file cannot be read or holds no such result.
    """
    try:
        result: dict[str, Any] = json.loads(file.read_text())
        known = result["format"] == FORMAT and {"settings", "results"} <= result.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: it is no result of this program ({error!r})") from error
    if not known:
        raise UsageError(f"cannot read {file}: it is no result of this program in format {FORMAT}")
    return result


def _maker(method: Method | None) -> str:
    """Name and version of the library, or our commit: a file may be the work of several days."""
    now = environment(*PACKAGES)
    if method is None or method.package is None:
        return f"diffquant {now['commit']}"
    return f"{method.package} {now['versions'][method.package]}"


def method_table(*results: dict[str, Any]) -> str:
    """Markdown with a row for each method, tier by tier; columns of each model, the bits those of the first."""
    order = [FULL, *(method.name for method in METHODS)]
    names = [name for name in order if any(name in result["results"] for result in results)]
    heads = [head for result in results for head in _heads(result, len(results) > 1)]
    rows = []
    for name in names:
        cells = [cell for result in results for cell in _cells(result, name)]
        bits = next(_bits(result["results"][name]) for result in results if name in result["results"])
        rows.append([name, bits, *cells])
    return "\n".join(markdown(["method", "bits", *heads], rows))


def _heads(result: dict[str, Any], named: bool) -> list[str]:
    prefix = f"{result['settings']['model']}: " if named else ""
    return [f"{prefix}perplexity", "KL, nats", *(["HellaSwag"] if _has_items(result) else [])]


def _cells(result: dict[str, Any], name: str) -> list[str]:
    row = result["results"].get(name, {})
    if "kl" not in row:
        cells = [f"not measured: {row['missing']}" if "missing" in row else "-", "-"]
    else:
        cells = [f"{row['perplexity']:.3f}", f"{row['kl']:.4f}"]
    return [*cells, _accuracy(row)] if _has_items(result) else cells


def _bits(row: dict[str, Any]) -> str:
    if "bits" not in row:
        return "-"
    bits = f"{row['bits']:.3f}".rstrip("0").rstrip(".")
    return bits if row.get("held_bits", row["bits"]) == row["bits"] else f"{bits}, held in {row['held_bits']:.3f}"


def _accuracy(row: dict[str, Any]) -> str:
    if not row.get("items"):
        return "-"
    accuracy = estimate([float(digit) for digit in row["correct"]])
    return f"{accuracy.mean:.1%}" + (f" ± {accuracy.se:.1%}" if accuracy.se is not None else "")


def _has_items(result: dict[str, Any]) -> bool:
    return any(row.get("items") for row in result["results"].values())


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
