"""The verb `search`: the widths that cost least under a budget."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.calib.search.allocation import Budget
from diffquant.calib.search.outputs import check_search_output, write_search
from diffquant.calib.search.result import SearchResult
from diffquant.calib.search.search import Search, SearchOptions
from diffquant.source.source import Source
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs.arguments import numbers, path_or_none, texts


def search(
    model: Path | str | Source,
    output: Path | str,
    budget: str | float,
    *,
    targets: str | Sequence[str] = "weights",
    bits: str | Sequence[int] = (8, 6, 4),
    granularity: str = "g32",
    text: Path | str | None = None,
    windows: int = 8,
    window: int = 256,
    check_characters: int = 16384,
    dtype: str = "float32",
    device: str = "auto",
    progress: Progress | None = None,
) -> SearchResult:
    """Find the widths that cost least under a budget, and write them as a recipe.

        recipe = diffquant.search("checkpoint", "searched", 4.75).recipe
        diffquant.quantize("checkpoint", "checkpoint-searched", recipe)

    Args:
        model: checkpoint to search.
        output: folder for the recipe, the measurements and a plot; an interrupted search goes on there.
        budget: average stored bits of each target, scales included, such as 4.5; or bytes of weights, such as "90MB".
        targets: names among weights, k, v and logits.
        bits: widths to choose among.
        granularity: what shares one scale of a weight: "g32", "g128", "row".
        text: file whose first half is measured on and whose second half is compared on; prose ships.
        windows: number of windows that are measured on.
        window: tokens of a window.
        check_characters: most characters of the second half that are compared on.
        dtype: name of the models' dtype.
        device: device that they run on; "auto" is CUDA where there is one, else the processor.
        progress: function called with the measurements done; by default a line on a terminal, one per minute in a log.

    Raises:
        DiffQuantError: the checkpoint, the text, the targets, the widths or the budget do not fit.
        MissingDependencyError: scipy is not installed.
    """
    folder = Path(output)
    options = SearchOptions(
        texts(targets),
        numbers("bits", bits),
        granularity,
        path_or_none(text),
        windows,
        window,
        check_characters,
        dtype,
        device,
    )
    wanted = Budget.parse(str(budget))
    check_search_output(str(wanted), folder)
    run = Search(model if isinstance(model, Source) else Path(model), wanted, options, folder)
    result = run.run(progress or progress_for("search"))
    write_search(result, folder)
    return result
