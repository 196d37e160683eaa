"""The verb `compare`: two results on the same items."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.files import find_file_or_xz
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments

if TYPE_CHECKING:
    from diffquant.measure.sweep.compare import ComparisonReport

Before = Annotated[kinds.PathText, kinds.Kind(str, "A", is_positional=True)]
_BENCH = "bench.json"
After = Annotated[kinds.PathText, kinds.Kind(str, "B", is_positional=True)]


@check_arguments
def compare(before: Before, after: After) -> "ComparisonReport | str":
    """Compare two results on the same items, item by item.

        diffquant compare sweep@16 sweep@6:tensor
        print(diffquant.compare("sweep@16", "sweep@6:tensor").summary())

    Shows the paired difference with its 95 % confidence interval, McNemar's exact test, and the items whose answer
    changed between right and wrong. If each result has one configuration, these two are compared. Otherwise
    configurations of the same model are compared, matched by path or else by name. For two folders of bench, it lists
    the measurements that changed by more than noise.

    Args:
        before: a sweep's folder; FOLDER@WORDS for its configuration with these words in model, target or scheme; a
            samples_*.jsonl file of lm-eval; or a folder of bench.
        after: result to compare with the first, given in the same way.

    Returns:
        Differences with intervals, and the items whose answer changed between right and wrong; for bench, a text with
        one line per change.

    Raises:
        UsageError: a result cannot be read, or the two have no configuration in common or different items.
    """
    from diffquant.measure.sweep.compare import compare as compare_sources

    benches = [find_file_or_xz(path / _BENCH if path.is_dir() else path) for path in (Path(before), Path(after))]
    if all(file.is_file() and file.name.startswith(_BENCH) for file in benches):
        from diffquant.benchmarks.cells import read_result, summarize_changes

        return summarize_changes(*map(read_result, benches))
    return compare_sources(before, after)
