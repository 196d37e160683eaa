"""What quantized weights cost a model: our roundings beside bitsandbytes, torchao and HQQ at equal bits.

    python -m diffquant.bench.rounding MODEL --json bench/results/rounding/MODEL.json

Every method quantizes the weights of the same linear layers, rounded to float16 first, and the model runs in
float32 on what it gives back; embedding, head, norms and λ stay as they are. The text's first half is what gptq
reads, its second what is scored. Each result is on the disk before the next is measured: started again, the
program measures what is missing.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffquant.checkpoint.staging import write_atomically
from diffquant.errors import UsageError
from diffquant.evals.stats import estimate
from diffquant.progress import Progress, progress_for, silent

from .environment import environment
from .quantizers import METHODS, PACKAGES, TIERS, Method
from .rounded_model import Options, Subject

FORMAT = 1
FULL = "16 bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a checkpoint folder or a .gguf file")
    parser.add_argument("--text", type=Path, help="in place of the prose that ships")
    parser.add_argument("--characters", type=int, default=Options.characters)
    parser.add_argument("--window", type=int, default=Options.window)
    parser.add_argument("--tokens", type=int, default=Options.tokens, help="that gptq reads")
    parser.add_argument("--items", type=int, default=Options.items, help="of HellaSwag; 0 for none")
    parser.add_argument("--only", default="", help="parts of methods' names, with semicolons; all by default")
    parser.add_argument("--json", type=Path, dest="file", required=True, help="where the numbers are and go")
    given = parser.parse_args()
    options = Options(given.text, given.characters, given.window, given.tokens, given.items)
    result = measure(given.model, options, chosen(given.only), given.file, progress_for("rounding"))
    print(table(result))


def chosen(parts: str) -> list[Method]:
    """Methods whose names contain one of the parts.

    Raises:
        UsageError: a part that no name contains.
    """
    wanted = [part.strip() for part in parts.split(";") if part.strip()]
    unknown = [part for part in wanted if not any(part in method.name for method in METHODS)]
    if unknown:
        known = "; ".join(method.name for method in METHODS)
        raise UsageError(f"no method is called {', '.join(map(repr, unknown))}; known are {known}")
    return [method for method in METHODS if not wanted or any(part in method.name for part in wanted)]


def measure(
    path: Path, options: Options, methods: Sequence[Method], file: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Measure every method, writing the file after each.

    Raises:
        UsageError: the file is another run's, or the text's first half is too short for gptq.
    """
    subject = Subject(path, options)
    result = _begun(file, subject.settings())
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


def _begun(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the file holds already, or the beginning of a result.

    Raises:
        UsageError: it holds something else.
    """
    fresh = {"format": FORMAT, "environment": environment(*PACKAGES), "settings": settings, "results": {}}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    try:
        former = json.loads(file.read_text())
        same = former["format"] == FORMAT and former["settings"] == settings
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {file}: it is no result of this program ({error!r})") from error
    if not same:
        raise UsageError(f"{file} holds results of another model, text or setting; name another file with --json")
    return fresh | {"results": former["results"]}


def _maker(method: Method | None) -> str:
    """The library and its version, or our commit: a file may be the work of several days."""
    now = environment(*PACKAGES)
    if method is None or method.package is None:
        return f"diffquant {now['commit']}"
    return f"{method.package} {now['versions'][method.package]}"


def table(result: dict[str, Any]) -> str:
    """Markdown: a row a method, tier by tier."""
    results = result["results"]
    rows = ["| method | bits | perplexity | KL, nats | HellaSwag |", "|---|---|---|---|---|"]
    order = {method.name: (TIERS.index(method.tier), number) for number, method in enumerate(METHODS)}
    for name in sorted(results, key=lambda name: order.get(name, (-1, -1))):
        rows.append(f"| {name} | {' | '.join(_columns(results[name]))} |")
    return "\n".join(rows)


def _columns(row: dict[str, Any]) -> list[str]:
    if "missing" in row:
        return ["-", f"not measured: {row['missing']}", "-", "-"]
    bits = f"{row['bits']:.3f}".rstrip("0").rstrip(".")
    held = row.get("held_bits", row["bits"])
    accuracy = "-"
    if row.get("items"):
        found = estimate([float(each) for each in row["correct"]])
        accuracy = f"{found.mean:.1%}" + (f" ± {found.se:.1%}" if found.se is not None else "")
    return [
        bits if held == row["bits"] else f"{bits}, held in {held:.3f}",
        f"{row['perplexity']:.3f}",
        f"{row['kl']:.4f}",
        accuracy,
    ]


if __name__ == "__main__":
    main()
