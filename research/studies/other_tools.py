"""What other quantizers, caches and exporters do with DIFF models: a table of tools and models.

    make test-all ONLY=quantizers
    build/quantizers/bin/python -m pip install --no-deps optimum-quanto==0.2.7 onnxscript
    build/quantizers/bin/python -m research.studies.other_tools --json research/results/other-tools.json

Models are random, of two layers, and each tool runs in a process that never imports diffquant. What it writes is opened
by stock transformers in another process. With `--only` rows of other tools stay as they were.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from safetensors.torch import load_file, save_file

import diffquant
from diffquant import data
from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import UsageError
from diffquant.support.files import write_json
from research.studies.results import read_json
from tests.support.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "accelerate", "auto-round", "bitsandbytes", "hqq", "llmcompressor", "nvidia-modelopt", "onnxruntime", "onnxscript",
    "optimum-quanto", "torchao",
)  # fmt: skip
# Widths are multiples of 128, the group of most tools; the vocabulary is the tokenizer's.
_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "initializer_range": 0.05}
# Each model's source among `tests.support.checkpoints`, whether its folder is ours, and whether its code may run.
MODELS = {
    "Llama": ("llama", False, False),
    "DiffLlama": ("diffllama", False, False),
    "V1 as unilm has it": ("unilm-v1", False, False),
    "V2 as unilm has it": ("unilm-v2", False, False),
    "V1 in our folder": ("unilm-v1", True, True),
    "V1 in our folder, code not trusted": ("unilm-v1", True, False),
    "V2 in our folder": ("unilm-v2", True, True),
    "V2 in our folder, code not trusted": ("unilm-v2", True, False),
}


# Models that every tool refuses need no column: unilm's as stored, and folders whose code is not trusted.
SHOWN = tuple(name for name in MODELS if not name.endswith(("as unilm has it", "code not trusted")))


def main(
    file: Annotated[Path, typer.Option("--json", help="Where the rows are and go.")],
    only: Annotated[str, typer.Option(help="Part of the names of tools to run; all by default.")] = "",
    show: Annotated[bool, typer.Option("--show", help="Only print the table of the rows there.")] = False,
) -> None:
    """Run each tool on each model, and write the rows."""
    if show:
        rows = read_json(file)["rows"]
        tools = dict.fromkeys(row["tool"] for row in rows)
        lines = [["tool", *SHOWN], ["---"] * (1 + len(SHOWN)), *([tool, *table_cells(rows, tool)] for tool in tools)]
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    described, former = describe_environment(*PACKAGES), _former_rows(file)
    chosen = [tool for tool in _tools() if only in tool]
    if not chosen:
        raise UsageError(f"no tool is called {only!r}; choose from {', '.join(_tools())}")
    with TemporaryDirectory() as place:
        models = write_models(Path(place))
        rows = _probe(chosen, models, Path(place))
    kept: list[dict[str, Any]] = [row for row in former if row["tool"] not in chosen]
    made: list[dict[str, Any]] = [{"commit": described["commit"]} | row for row in rows]
    together: list[dict[str, Any]] = sorted([*kept, *made], key=_place)
    write_json(file, {"environment": described, "rows": together})


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return _tools().index(row["tool"]), list(MODELS).index(row["model"])


def _former_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of an earlier run, each with the commit that made it."""
    if not file.exists():
        return []
    former = read_json(file)
    return [{"commit": former["environment"]["commit"]} | row for row in former["rows"]]


def _tools() -> list[str]:
    # The probe imports transformers, which `--help` does without.
    from research.studies.other_tools_probe import TOOLS

    return list(TOOLS)


def write_models(place: Path) -> dict[str, tuple[str, bool]]:
    """Write every model of `MODELS`; each one's folder and whether its code may run, by name."""
    [prose] = [model for model in data.pocket_models("prose") if model.name.endswith("transformer")]
    made = {}
    for name, (source, is_ours, trust) in MODELS.items():
        folder = place / f"{source}-{'ours' if is_ours else 'plain'}"
        if not folder.exists():
            source_folder = place / f"{source}-source" if is_ours else folder
            write_checkpoint(source_folder, source, **_SIZES)
            _shrink(source_folder / "model.safetensors")
            for part in ("tokenizer.json", "tokenizer_config.json"):
                copyfile(prose / part, source_folder / part)
            if is_ours:
                # Weights stay as they are: only a cache of 8 bits is recorded, which other loaders leave out.
                diffquant.quantize(source_folder, folder, {"kv": "8:row"})
        made[name] = (str(folder), trust)
    return made


def _shrink(file: Path) -> None:
    """Make matrices small enough that the logits of two layers stay moderate."""
    tensors = {
        name: tensor * min(1.0, 0.05 / float(tensor.std())) if tensor.ndim == 2 else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def table_cells(rows: list[dict[str, Any]], tool: str) -> list[str]:
    """What a tool reached with each model of `SHOWN`, in a table's words."""
    by_model = {row["model"]: row for row in rows if row["tool"] == tool}
    return [_cell(by_model[name]) for name in SHOWN]


def _cell(row: dict[str, Any]) -> str:
    if row["reached"] is None:
        return "refused"
    # Some tools round weights only while a model runs, so the folder that was opened again counts.
    changed, linears = row.get("linears_reopened", row.get("linears", (0, 0)))
    share = f" {changed} of {linears}" if changed != linears else ""
    kl = row.get("kl_reopened", row.get("kl"))
    return f"{row['reached']}{share}" + ("" if kl is None else f", {kl:.1e}")


def _probe(tools: list[str], models: dict[str, tuple[str, bool]], place: Path) -> list[dict[str, Any]]:
    """A row for each tool and model: how far the tool came, and whether what it wrote was opened again."""
    file = place / "models.json"
    write_json(file, models)
    command = [sys.executable, "-m", "research.studies.other_tools_probe", str(file), str(place), *tools]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, cwd=place, stdout=subprocess.PIPE, text=True, check=True)
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (tool, name): {"tool": tool, "model": name, "reached": None, "error": "the process ended"}
        for tool in tools
        for name in models
    }
    seen = set()
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            row = json.loads(line.removeprefix("ROW ").replace(f"{place}/", ""))
            if row.pop("diffquant_imported"):
                raise UsageError(f"{row['tool']} imported diffquant, which the comparison is to do without")
            key = row["tool"], row["model"]
            rows[key] = rows[key] | row if key in seen else row
            seen.add(key)
    return list(rows.values())


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
