"""Speed of HellaSwag: our scorer beside lm-eval's HFLM, on the same model, items and cores.

    python -m research.bench.programs.hellaswag --items 100 MODEL.gguf --json bench/results/hellaswag-speed.json

Scorers take turns (A B A B), so that what else the machine does falls on all of them; CPU seconds
are given too, which depend on it less. HFLM gets transformers' own Llama with dense weights. In float32
both must choose the same ending of every item. Each one's defaults are not of one dtype: HFLM takes the
checkpoint's, which is float32 for a GGUF file, where ours is bfloat16 on a machine that has it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from diffquant.benchmarks.measuring import describe_environment, run_in_turns
from diffquant.checkpoints.side_files import read_json
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import MissingDependencyError, ToleranceError, UsageError
from diffquant.measure.protocols.hellaswag import HellaSwagItem, evaluate_hellaswag, load_items
from diffquant.measure.tasks.lm_eval import require_lm_eval
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.reports.tables import align_columns
from diffquant.support.devices import resolve_dtype
from tests.support.apart import JsonFile, clocked, tell

# HFLM's own default, and the size at which it was fastest on the machine this was written on.
_BATCH_SIZES = (1, 8)


# Gives the chosen ending of each item, by summed log-probability.
Score = Callable[[Sequence[HellaSwagItem]], list[int]]


def main(
    model: Annotated[Path, typer.Argument(help="A Llama: a .gguf file or a folder.")],
    items: Annotated[int, typer.Option(min=1, help="Items to score.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each scorer.")] = 5,
    file: JsonFile = None,
) -> None:
    """Measure HellaSwag's items a second beside lm-eval's HFLM."""
    result = measure_scorers(model, items, repeats)
    tell(result, file, scorer_summary(result))
    _require(result)


def measure_scorers(path: Path, items: int, repeats: int) -> dict[str, Any]:
    """Time every scorer `repeats` times, in turns.

    Raises:
        MissingDependencyError: lm-eval's HFLM cannot be imported.
    """
    questions = load_items(limit=items)
    entrants = scorers(path)
    for score in entrants.values():
        score(questions[:2])
    turns = run_in_turns({who: partial(clocked, partial(score, questions)) for who, score in entrants.items()}, repeats)
    timings = [
        {
            **dict(zip(("name", "dtype", "batch_size"), who, strict=True)),
            **{what: [turn[what] for turn in of_scorer] for what in ("seconds", "cpu_seconds")},
            "choices": of_scorer[-1]["given"],
        }
        for who, of_scorer in turns.items()
    ]
    return {
        "environment": describe_environment() | {"threads": torch.get_num_threads(), "lm_eval": version("lm_eval")},
        "model": path.name,
        "items": items,
        "default_dtype": {"diffquant": str(resolve_dtype()).removeprefix("torch."), "HFLM": "float32"},
        "timings": timings,
    }


def scorers(path: Path) -> dict[tuple[str, str, int | None], Score]:
    """Scorers that take part by name, dtype and batch size: ours and HFLM at its sizes, in float32 and bfloat16."""
    tokenizer = load_tokenizer(path)
    entrants: dict[tuple[str, str, int | None], Score] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        entrants["diffquant", name, None] = _ours(load(path, dtype=dtype), tokenizer)
        oracle = _transformers_llama(path, dtype)
        entrants |= {("HFLM", name, n): _hflm(oracle, tokenizer, n) for n in _BATCH_SIZES}
    return entrants


def scorer_summary(result: dict[str, Any]) -> str:
    """Text with a line for each scorer, the ratios, and whether the choices agree."""
    items = result["items"]
    rows = []
    for timing in result["timings"]:
        name = timing["name"] + (f", batch {timing['batch_size']}" if timing["batch_size"] else "")
        rate, cpu = items / median(timing["seconds"]), median(timing["cpu_seconds"]) / items
        rows.append([name, timing["dtype"], f"{rate:.2f}", f"{cpu:.3f}"])
    lines = align_columns(["scorer", "dtype", "items/s", "CPU s/item"], rows, names=2)
    lines += [
        f"{what}: {wall:.2f} times HFLM's items per second, {cpu:.2f} times per CPU second"
        for what, (wall, cpu) in ratios(result).items()
    ]
    lines.append(f"float32: the same choice on {_count_agreeing(result)} of {items} items")
    return "\n".join(lines)


def ratios(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Ratios of our speed to HFLM's, by wall clock and by CPU time, from the medians of each's turns."""
    medians = {
        (t["name"], t["dtype"], t["batch_size"]): (median(t["seconds"]), median(t["cpu_seconds"]))
        for t in result["timings"]
    }
    ours, theirs = result["default_dtype"]["diffquant"], result["default_dtype"]["HFLM"]
    compared = {
        f"{dtype}, HFLM at batch {n}": (("HFLM", dtype, n), ("diffquant", dtype, None))
        for dtype in ("float32", "bfloat16")
        for n in _BATCH_SIZES
    } | {f"each one's defaults, {ours} against {theirs}": (("HFLM", theirs, 1), ("diffquant", ours, None))}
    return {
        what: (medians[slow][0] / medians[fast][0], medians[slow][1] / medians[fast][1])
        for what, (slow, fast) in compared.items()
    }


def _ours(model: Any, tokenizer: Any) -> Score:
    return lambda items: evaluate_hellaswag(TorchModel(model, tokenizer), items).details["choices_by_sum"]


def _hflm(model: Any, tokenizer: Any, batch_size: int) -> Score:
    from lm_eval.api.instance import Instance

    scorer = _hflm_class()(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def score(items: Sequence[HellaSwagItem]) -> list[int]:
        texts = [(item.query, f" {ending}") for item in items for ending in item.endings]
        requests = [Instance("loglikelihood", {}, text, i) for i, text in enumerate(texts)]
        answers = iter(scorer.loglikelihood(requests, disable_tqdm=True))
        logprobs = [[next(answers)[0] for _ in item.endings] for item in items]
        return [max(range(len(row)), key=row.__getitem__) for row in logprobs]

    return score


def _hflm_class() -> Any:
    require_lm_eval()
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise MissingDependencyError(
            f"lm-eval's HFLM cannot be imported ({error}): pip install 'lm-eval[hf]'"
        ) from error
    return HFLM


def _transformers_llama(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.utils.quantization_config import GgufConfig

    if path.suffix != ".gguf":
        model_type = read_json(path / "config.json").get("model_type")
        # Once diffquant is imported, the auto classes know its model types, too; those would be ours against ours.
        if model_type not in CONFIG_MAPPING_NAMES:
            raise UsageError(f"HFLM cannot load {path.name}, which transformers does not know")
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    # Packed GGUF products would be slower still; both sides get dense weights.
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def _count_agreeing(result: dict[str, Any]) -> int:
    """Number of items on which every scorer in float32 chose the same ending."""
    choices = [timing["choices"] for timing in result["timings"] if timing["dtype"] == "float32"]
    return sum(len(set(chosen)) == 1 for chosen in zip(*choices, strict=True))


def _require(result: dict[str, Any]) -> None:
    """Check that the scorers agree.

    Raises:
        ToleranceError: in float32 they choose different endings of some items.
    """
    if _count_agreeing(result) < result["items"]:
        raise ToleranceError(f"the scorers choose differently on {result['items'] - _count_agreeing(result)} items")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
