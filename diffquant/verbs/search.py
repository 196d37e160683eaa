"""The verb `search`: the widths that cost least under a budget."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.recipe.rounding import paths_of
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, path_or_none, paths, texts, widths
from diffquant.verbs.notes import chosen_device, wrote

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
    planned: "Callable[[Search], None] | None" = None,
    progress: Progress | None = None,
) -> "SearchResult":
    """Find the widths that cost least under a budget.

        diffquant search model -o search --budget 4.5
        recipe = diffquant.search("model", "search", 4.5).recipe

    They are written as a recipe, which quantize, generate, eval and sweep take.

    Args:
        model: as `quantize` takes it.
        output: folder for the recipe, measurements and plot; an interrupted search goes on there.
        budget: average stored bits of each target, scales included, such as 4.5; or size of the weights, such as 90MB.
        targets: what to quantize, together: weights, k, v, logits.
        bits: widths to choose among: integers of 2 to 8 bits, or number formats such as nvfp4 and mxfp6.
        granularity: what shares one scale of a weight: g32, g128 or row.
        text: as `quantize` takes it.
        windows: number of windows of the text's first half to measure on.
        window: number of tokens that the model sees at once.
        characters: number of characters of the text's second half to compare on.
        tensor_types: file to write the widths of weights to, as llama-quantize's --tensor-type-file takes them.
        roles: also measure signal and noise queries apart, and λ and gates, and tell experts apart by layer: what each
            pays for its bits.
        dtype: dtype of models that run: auto (bfloat16 where it is native), float32, bfloat16 or float16.
        device: device that models run on: cpu, cuda or cuda:N; auto uses CUDA where there is a CUDA device.
        planned: function called with the search before the first measurement; what it raises ends the run.
        progress: function called with the measurements done; by default a line on a terminal, one per minute in a log.

    Returns:
        The recipe, and what was measured.

    Raises:
        DiffQuantError: the checkpoint, the text, the targets, the widths or the budget do not fit.
        MissingDependencyError: scipy is not installed.
    """
    from diffquant.calib.search.allocation import Budget
    from diffquant.calib.search.outputs import check_same_search, check_search_output, write_search
    from diffquant.calib.search.search import Search
    from diffquant.calib.search.tensor_types import check_kinds, check_lines_output, check_widths
    from diffquant.calib.search.tensor_types import tensor_types as llama_cpp_types
    from diffquant.support.files import write_atomically

    lines = path_or_none(tensor_types)
    folder, wanted = Path(output), Budget.parse(str(budget))
    device = chosen_device(device)
    if lines is not None:
        check_widths(texts(targets), widths(bits))
        check_lines_output(lines, folder)
    check_search_output(str(wanted), folder)
    run = Search(
        model,
        wanted,
        folder,
        targets=texts(targets),
        widths=widths(bits),
        granularity=granularity,
        text=paths_of(paths(text or ())),
        windows=windows,
        window=window,
        check_characters=characters,
        dtype=dtype,
        device=device,
        parts=roles,
    )
    check_same_search(str(wanted), run.source, run.targets, folder)
    if lines is not None:
        check_kinds((unit.kind for unit in run.units if unit.target == "weights"), run.source.spec.maps)
    if planned is not None:
        planned(run)
    result = run.run(progress or progress_for("search"))
    files = write_search(result, folder)
    if lines is not None:
        write_atomically(lines, llama_cpp_types(result))
        files.append(lines)
    wrote(files)
    return result
