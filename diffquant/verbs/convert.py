"""The verb `convert`: rewrites a checkpoint as another kind of model that computes the same function."""

from typing import TYPE_CHECKING, Annotated, Literal

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, to_paths
from diffquant.verbs.notes import check_push, push_folder

if TYPE_CHECKING:
    from diffquant.quantization.conversion import ConversionResult

Kind = Annotated[str, kinds.Kind(Literal["diffllama", "diff-v2", "rotated", "smoothed", "scaled"])]


@check_arguments
def convert(
    model: kinds.Model,
    output: kinds.NewFolder,
    to: Kind,
    *,
    dtype: kinds.StoredDtype | None = None,
    text: kinds.Texts | None = None,
    push: kinds.Push | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "ConversionResult":
    """Rewrite a checkpoint as another kind with the same function.

        diffquant convert model -o model-diff-v2 --to diff-v2
        diffquant.convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-diff-v2", "diff-v2")

    Args:
        model, push, overwrite: see `quantize`.
        output: folder to create; written atomically.
        to: target kind: diffllama (from unilm's V1), diff-v2 (from llama), or, from any Transformer of the family and
            before `quantize`: rotated, which spreads outlier channels; smoothed, which moves them into the weights
            for 8-bit activations (SmoothQuant); or scaled, which protects weights of large inputs at 4 bits (AWQ).
        dtype: dtype of matrices: bfloat16, float16 or float32; by default the source's, bfloat16 for a GGUF file's
            quantized weights, or float32 for rotated ones. Vectors (norms, λ, biases that are not rotated) keep their
            dtype.
        text: calibration data for smoothed and scaled; see `quantize`.
        progress: function called with output bytes; by default a line on a terminal, one per minute in a log.

    Returns:
        Kinds and sizes, and the error of tensors that were rounded.

    Raises:
        DiffQuantError: the checkpoint or the output cannot be used, or there is no exact conversion to this kind.
    """
    from diffquant.quantization.conversion import convert as write
    from diffquant.recipe.rounding import to_calibration_paths

    check_push(push)
    shown = progress or progress_for("convert")
    sources = to_calibration_paths(to_paths(text or ()))
    report = write(model, output, to, dtype=dtype, text=sources, overwrite=overwrite, progress=shown)
    push_folder(output, push)
    return report
