"""Cost of quantized weights to a model: our roundings beside other libraries at equal bits.

    python -m research.studies.rounding MODEL --json research/results/rounding/MODEL.json
    python -m research.studies.rounding --show research/results/rounding/*.json

Every method quantizes the weights of the same linear layers, rounded to float16 first, and the model runs in
float32 on what it gives back; embedding, head, norms and λ stay as they are. The text's first half is what gptq and
the other methods that read one are given; what is scored is its second half and, as text of another kind, the
contexts of HellaSwag. Each result is on the disk before the next is measured: started again, the program measures
what is missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import UsageError
from diffquant.support.files import find_file_or_xz, write_json
from diffquant.support.installation import result_version_digest
from diffquant.support.progress import Progress, progress_for, report_nothing
from research.studies.quantizers import METHODS, VARIANTS
from research.studies.results import read_json
from research.studies.rounded_model import RoundingOptions, Subject
from research.studies.rounding_method import TIERS, Method
from research.studies.rounding_tables import FULL, lead_table, method_table, option_table, size_table
from research.studies.text_quantizers import TEXT_METHODS

FORMAT = 1
CONTESTANTS = (*METHODS, *TEXT_METHODS)
_PACKAGES = tuple(sorted({method.package for method in CONTESTANTS if method.package}))
_MODULES = ("rounded_model", "model_reading", "rounding_method", "quantizers", "text_quantizers")
_CODE = tuple(f"research.studies.{name}" for name in _MODULES)


def main(
    paths: Annotated[list[Path], typer.Argument(help="A checkpoint folder or a .gguf file; with --show, results.")],
    text: Annotated[Path | None, typer.Option(help="In place of the bundled text.")] = RoundingOptions.text,
    characters: Annotated[
        int, typer.Option(help="Characters that are scored of the second half and of the other text.")
    ] = RoundingOptions.characters,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = RoundingOptions.window,
    tokens: Annotated[int, typer.Option(help="Tokens of the first half that are read.")] = RoundingOptions.tokens,
    items: Annotated[int, typer.Option(help="Items of HellaSwag; 0 for none.")] = RoundingOptions.items,
    only: Annotated[str, typer.Option(help="Parts of methods' names, with semicolons; all by default.")] = "",
    file: Annotated[Path | None, typer.Option("--json", help="Where the numbers are and go.")] = None,
    variants: Annotated[bool, typer.Option("--variants", help="gptq's options in place of other libraries.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Compare what our roundings and those of other libraries cost a model at equal bits."""
    if show:
        results = [read_result(path) for path in paths]
        for result in results:
            print(f"{result['settings']['model']}\n\n{method_table(result, TIERS[:1])}\n")
        print(f"{size_table(results, TIERS[1:])}\n\n{lead_table(results)}\n\n{option_table(results)}")
        return
    if len(paths) != 1 or file is None:
        raise UsageError("give one model and --json, or --show and results")
    options = RoundingOptions(text, characters, window, tokens, items)
    print(
        method_table(
            measure_methods(
                paths[0], options, chosen(only, VARIANTS if variants else CONTESTANTS), file, progress_for("rounding")
            )
        )
    )


def chosen(parts: str, methods: Sequence[Method] = CONTESTANTS) -> list[Method]:
    """Methods whose names contain one of the parts.

    Raises:
        UsageError: no name contains one of the parts.
    """
    wanted = [part.strip() for part in parts.split(";") if part.strip()]
    unknown = [part for part in wanted if not any(part in method.name for method in methods)]
    if unknown:
        known = "; ".join(method.name for method in methods)
        raise UsageError(f"no method is called {', '.join(map(repr, unknown))}; choose from {known}")
    return [method for method in methods if not wanted or any(part in method.name for part in wanted)]


def measure_methods(
    path: Path, options: RoundingOptions, methods: Sequence[Method], file: Path, progress: Progress = report_nothing
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
            result["results"][name] = subject.measured(method, former) | _provenance(method)
            write_json(file, result)
    progress(len(todo), len(todo), "done")
    return result


def _begin(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Result that the file holds already, or the beginning of one.

    Raises:
        UsageError: the file holds something else.
    """
    fresh = {"format": FORMAT, "environment": describe_environment(*_PACKAGES), "settings": settings, "results": {}}
    if not find_file_or_xz(file).exists():
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
        result: dict[str, Any] = read_json(file)
        known = result["format"] == FORMAT and {"settings", "results"} <= result.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: it is no result of this program ({error!r})") from error
    if not known:
        raise UsageError(f"cannot read {file}: it is no result of this program in format {FORMAT}")
    return result


def _provenance(method: Method | None) -> dict[str, Any]:
    """The method, machine and date behind a row: a file may be the work of several days."""
    now = describe_environment(*_PACKAGES)
    package = None if method is None else method.package
    maker = f"{package} {now['versions'][package]}" if package else f"diffquant {now['commit']}"
    about = {name: now[name] for name in ("commit", "date", "device")}
    return {"made_by": maker, "code": result_version_digest(_CODE)} | about


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
