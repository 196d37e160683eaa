"""First act: the paper's Figure 8 on a Transformer, a DIFF V1 and a DIFF V2 that were trained alike and ship."""

import json
from collections.abc import Callable
from pathlib import Path

from diffquant import data
from diffquant.demo.speech import speak_twice
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.report.tables import aligned
from diffquant.support.progress import progress_for
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.outputs import write_outputs
from diffquant.sweep.result import SweepResult
from diffquant.sweep.run import run_sweep

NEEDLE = "needle:4"
RECIPE = Recipe.of(weights="4:g32", kv=8, rounding="mse")
PROMPT = (
    "The magic number for Paris is 42. It was a very good night. The magic number for Rome is 17. "
    "He did not know what to do. The magic number for Paris is"
)
# Of the six trainings, rounded at 4 bits with one scale per tensor; research/tests holds it to their raw files.
ANSWER = "V1 by 0.71 bits [0.50, 0.92], V2 by 0.33 [0.15, 0.50]"
# Bits that the same trainings lose at equal steps, and that three sizes win at the paper's ratio of ranges.
SENSITIVITY, AT_PAPERS_RATIO = "V1 0.57 bits and V2 0.38", "2.05 to 3.03"
_ITEMS = 30
_TASK_OPTIONS = {NEEDLE: {"limit": _ITEMS}, "perplexity": {"characters": 6000}}


def show_figure_8(output: Path, say: Callable[[str], None]) -> None:
    """Round the attention logits of trained models, and show what is left of retrieval and of the predictions."""
    say("1. Do low-bit attention logits hurt DIFF models less than a Transformer?")
    say("(The paper's Figure 8.) A Transformer, a DIFF V1 and a DIFF V2, trained alike,")
    say("find numbers hidden in prose. Their attention logits are rounded to 4 and 3")
    say("bits: with one scale per tensor, as we read the paper, and with one per row after")
    say(f"subtracting its maximum (row:shift). So many of {_ITEMS} numbers are found:\n")
    _sweep("needle", NEEDLE, output / "retrieval", _found, say)
    if data.pocket_models("prose"):
        say("Three others predict English; KL from each one's own 16 bits, in nats:\n")
        _sweep("prose", "perplexity", output / "english", _divergence, say)
        say(f"They are one training of each kind, with seed {seed_of_the_models('prose')} and at the rate that is best")
        say("for it (the runs e1-*-seed-101 in research/figure8/results). By a protocol fixed")
        say("in advance there were six. Both DIFF kinds lost more in each, at 4 bits with")
        say(f"one scale per tensor: {ANSWER}.")
        say(f"Two factors decide it. At equal steps {SENSITIVITY} are lost, since the")
        say("predictions are more sensitive. Logits that range r times less far win about")
        say("log2(r) bits, and these hardly do. With r = 8, about the paper's, DIFF models")
        say(f"of three sizes win {AT_PAPERS_RATIO} bits.\n")
    say(f"The models that find numbers are of one training, with seed {seed_of_the_models('needle')}. Which of")
    say("them loses most at 4 bits with one scale per tensor is an accident of it: in")
    say("another training the Transformer lost most. With row:shift 3 bits cost none of")
    say("these models much. research/pages/figure8.md has intervals and all trainings.\n")


def seed_of_the_models(task: str) -> int:
    """The seed that the shipped models of a task were trained with."""
    runs = [json.loads((model / "training.json").read_text()) for model in data.pocket_models(task)]
    (seed,) = {run["schedule"]["seed"] for run in runs}
    return int(seed)


def ask_the_pocket_model(output: Path, overwrite: bool, say: Callable[[str], None]) -> None:
    """Quantize the retrieving DIFF V1, and ask it for a number in torch and in ONNX Runtime."""
    differential = next(model for model in data.pocket_models("needle") if model.name.endswith("diff-v1"))
    low = output / "needle-diff-v1-4bit"
    say(f"2. Quantize the DIFF V1 that finds numbers: weights {RECIPE.weights}, KV cache {RECIPE.k}")
    say(quantize(differential, low, RECIPE, overwrite=overwrite, progress=progress_for("quantize")).summary())
    say("\n3. Ask it in torch, and its export in ONNX Runtime")
    speak_twice(low, output / "needle-diff-v1-4bit-onnx", PROMPT, 2, overwrite, say)


def _sweep(
    trio: str, task: str, folder: Path, text: Callable[[SweepResult, int], str], say: Callable[[str], None]
) -> None:
    options = SweepOptions(
        tasks=(task,),
        bits=(16, 4, 3),
        granularities=("tensor", "row:shift"),
        task_options=_TASK_OPTIONS[task],
        # Processors without bfloat16 are several times slower in it, and these models are small.
        dtype="float32",
    )
    models = data.pocket_models(trio)
    result = run_sweep(models, options, folder, progress_for(f"{trio} models"))
    result.require_complete()
    points = len(result.cells) // len(models)
    # All but the first are logits, as the text above says.
    schemes = [cell.point.label.removeprefix("logits ") for cell in result.cells[:points]]
    rows = [
        [result.cells[first].point.model.name, *(text(result, first + offset) for offset in range(points))]
        for first in range(0, len(result.cells), points)
    ]
    say("\n".join(aligned(["", *schemes], rows)))
    say(f"wrote {', '.join(str(path) for path in write_outputs(result, folder))}\n")


def _found(result: SweepResult, cell: int) -> str:
    task_result = result.cells[cell].result
    if task_result is None or task_result.score is None or task_result.n is None:
        return "failed"
    return f"{round(task_result.score * task_result.n)}"


def _divergence(result: SweepResult, cell: int) -> str:
    task_result = result.cells[cell].result
    kl = task_result.details.get("kl") if task_result else None
    return "-" if kl is None else f"{kl:.3f}"
