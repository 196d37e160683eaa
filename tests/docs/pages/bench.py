"""The figures of docs/bench.md."""

from tests.docs.page import Page
from tests.docs.raw import raw

PAGE = Page("docs/bench.md")

# The bench


def _throughput(path: str) -> list[float]:
    cells = raw("cpu/bench.json")["cells"]
    return sorted(cell["ratio"] for cell in cells if (cell["section"], cell["path"]) == ("throughput", path))


PAGE.says(
    "runs at {} to {} of the Transformer's throughput as DIFF V1 and {} to {} as DIFF V2",
    *_throughput("DIFF V1"),
    *_throughput("DIFF V2"),
)
PAGE.leaves("malloc hid 59 of 152 of them", "a count over a file that is withdrawn; bench/results/cpu/bench.md has it")
PAGE.leaves("changes results by about a percent", "never measured: the kernel has run on no GPU")
PAGE.leaves("830M to 13.1B", "the paper's sizes")
