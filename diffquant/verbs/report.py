"""The verb `report`: the pages of runs, with an index of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from diffquant.verbs import kinds
from diffquant.verbs.arguments import path_or_none, paths
from diffquant.verbs.checked import checked

Runs = Annotated[kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "RUNS", by_place=True, repeats=True)]


@checked
def report(runs: Runs, output: kinds.NewFile | None = None) -> list[Path]:
    """Rewrite the pages of runs, with an index of them.

        diffquant report logits search bench-output

    Runs are folders that sweep, search, outliers or bench wrote. Their pages link to each other and to the index.

    Args:
        runs: folders of runs, or folders that hold some.
        output: index to write; index.html above the runs by default.

    Returns:
        The index and the pages.

    Raises:
        UsageError: there is no run, or a run's numbers cannot be read.
        OutputExistsError: the index would replace what diffquant did not write.
    """
    from diffquant.verbs.runs import write_index

    return write_index(paths(runs), path_or_none(output))
