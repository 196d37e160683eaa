"""The verb `compare`: two results on the same items."""

from typing import TYPE_CHECKING, Annotated

from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

if TYPE_CHECKING:
    from diffquant.measure.sweep.compare import ComparisonReport

Before = Annotated[kinds.PathText, kinds.Kind(str, "BEFORE", is_positional=True)]
After = Annotated[kinds.PathText, kinds.Kind(str, "AFTER", is_positional=True)]


@check_arguments
def compare(before: Before, after: After) -> "ComparisonReport":
    """Compare two results on the same items, item by item.

        diffquant compare sweep@16 sweep@6:tensor
        print(diffquant.compare("sweep@16", "sweep@6:tensor").summary())

    Shows the paired difference with its 95 % confidence interval, McNemar's exact test, and the items whose answer
    changed between right and wrong. If both sides have one configuration, these two are compared. Otherwise
    configurations of the same model are compared, matched by path or else by name.

    Args:
        before: the first result: a sweep's folder; FOLDER@WORDS for the configurations whose model, target or scheme
            match the words; or a samples_*.jsonl of lm-eval.
        after: the second result, in the same form.

    Returns:
        Differences with confidence intervals, and the items whose answer changed.

    Raises:
        UsageError: a result cannot be read, or the two have no configuration or different items in common.
    """
    from diffquant.measure.sweep.compare import compare as compare_sources

    return compare_sources(before, after)
