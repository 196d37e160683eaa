"""The verb `compare`: two results on the same items."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.files import find_stored
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

if TYPE_CHECKING:
    from diffquant.measure.sweep.compare import ComparisonReport

Before = Annotated[kinds.PathText, kinds.Kind(str, "A", by_place=True)]
_BENCH = "bench.json"
After = Annotated[kinds.PathText, kinds.Kind(str, "B", by_place=True)]


@check_arguments
def compare(before: Before, after: After) -> "ComparisonReport | str":
    """Compare two results on the same items, item by item.

        diffquant compare sweep@16 sweep@6:tensor
        print(diffquant.compare("sweep@16", "sweep@6:tensor").summary())

    Shows the paired difference with its 95 % interval, McNemar's exact test, and which items flipped. Where each side
    has one configuration the two are compared, whatever they are called; otherwise those of one model, which is the one
    at the same path, or else of the same name. Of two runs of bench, it lists what changed by more than noise.

    Args:
        before: a sweep's folder; FOLDER@WORDS for its configuration of that model, target or scheme; a samples_*.jsonl
            of lm-eval; or a folder of bench.
        after: the same, for what is compared with A.

    Returns:
        Differences with intervals, and the items that flipped; of bench, a line for each change.

    Raises:
        UsageError: a source cannot be read, the two have nothing in common, or were asked different items.
    """
    from diffquant.measure.sweep.compare import compare as compare_sources

    benches = [find_stored(path / _BENCH if path.is_dir() else path) for path in (Path(before), Path(after))]
    if all(file.is_file() and file.name.startswith(_BENCH) for file in benches):
        from diffquant.benchmarks.cells import read_result, summarize_changes

        return summarize_changes(*map(read_result, benches))
    return compare_sources(before, after)
