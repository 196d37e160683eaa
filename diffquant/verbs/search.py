"""The verb `search`: finds the most accurate bit widths under a size budget."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.recipe.rounding import to_calibration_paths
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, parse_widths, split_texts, to_path, to_paths
from diffquant.verbs.notes import choose_device, say_files_written

if TYPE_CHECKING:
    from diffquant.calib.search.result import SearchResult
    from diffquant.calib.search.search import Search

Size = Annotated[str | float, kinds.Kind(str, "SIZE")]


@check_arguments
def search(
    model: kinds.Model,
    output: kinds.NewFolder,
    budget: Size,
    *,
    targets: kinds.Targets = "weights",
    bits: kinds.Widths = "8,6,4",
    granularity: kinds.Name = "g32",
    text: kinds.Texts | None = None,
    windows: kinds.Count = 8,
    window: int = 256,
    characters: kinds.Count = 16384,
    tensor_types: kinds.File | None = None,
    roles: bool = False,
    dtype: kinds.Name = "float32",
    device: kinds.Name = "auto",
    on_plan: "Callable[[Search], None] | None" = None,
    progress: Progress | None = None,
) -> "SearchResult":
    """Find the most accurate bit widths under a size budget.

        diffquant search model -o search --budget 4.5
        recipe = diffquant.search("model", "search", 4.5).recipe

    The widths are written as a recipe for quantize, generate, eval and sweep.

    Args:
        model: see `quantize`.
        output: folder for the recipe, measurements and plot. To resume an interrupted search, give the same folder.
        budget: average stored bits of each target, including scales, such as 4.5; or size of the weights, such as 90MB.
        targets: targets to quantize together: weights, k, v, logits.
        bits: widths to choose from: integers of 2 to 8 bits, or number formats such as nvfp4 and mxfp6.
        granularity: granularity of weights: g32, g128 or row.
        text: see `quantize`.
        windows: maximum number of windows from the text's first half to measure on.
        window: number of tokens in a window.
        characters: number of characters from the text's second half on which to compare the results.
        tensor_types: file to write the weights' widths to, for llama-quantize's --tensor-type-file.
        roles: also measure the effect of bits for signal queries, noise queries, λ, gates, and each layer's experts
            separately.
        dtype: dtype of the running model: auto (bfloat16 where it is native), float32, bfloat16 or float16.
        device: device to run models on: cpu, cuda or cuda:N; auto uses CUDA if there is a CUDA device.
        on_plan: function called with the search before the first measurement; an exception in it ends the run.
        progress: function called with the measurements done; by default a line on a terminal, one per minute in a log.

    Returns:
        The recipe and the measurements.

    Raises:
        DiffQuantError: the checkpoint, the text, the targets, the widths or the budget cannot be used.
        MissingDependencyError: scipy is not installed.
    """
    from diffquant.calib.search.allocation import Budget
    from diffquant.calib.search.outputs import check_same_search, check_search_output, write_search
    from diffquant.calib.search.search import Search
    from diffquant.calib.search.tensor_types import check_ggml_types, check_gguf_names, check_types_output
    from diffquant.calib.search.tensor_types import format_tensor_types as llama_cpp_types
    from diffquant.support.files import write_atomically

    lines = to_path(tensor_types)
    folder, wanted = Path(output), Budget.parse(str(budget))
    device = choose_device(device)
    if lines is not None:
        check_ggml_types(split_texts(targets), parse_widths(bits))
        check_types_output(lines, folder)
    check_search_output(str(wanted), folder)
    run = Search(
        model,
        wanted,
        folder,
        targets=split_texts(targets),
        widths=parse_widths(bits),
        granularity=granularity,
        text=to_calibration_paths(to_paths(text or ())),
        windows=windows,
        window=window,
        check_characters=characters,
        dtype=dtype,
        device=device,
        parts=roles,
    )
    check_same_search(str(wanted), run.source, run.targets, folder)
    if lines is not None:
        check_gguf_names((unit.kind for unit in run.units if unit.target == "weights"), run.source.spec.maps)
    if on_plan is not None:
        on_plan(run)
    result = run.run(progress or progress_for("search"))
    files = write_search(result, folder)
    if lines is not None:
        write_atomically(lines, llama_cpp_types(result))
        files.append(lines)
    say_files_written(files)
    return result
