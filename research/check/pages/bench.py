"""The figures of docs/bench.md."""

from research.check.page import Page
from research.check.raw import raw

PAGE = Page("docs/bench.md", guides=("On a GPU",))

# The bench


def _throughput(path: str, file: str = "bench") -> list[float]:
    cells = raw(f"cpu/{file}.json")["cells"]
    return sorted(cell["ratio"] for cell in cells if (cell["section"], cell["path"]) == ("throughput", path))


def _megabytes(path: str) -> float:
    workload = "830M, 2048 tokens, batch 1, float32"
    [cell] = [c for c in raw("cpu/bench.json")["cells"] if (c["workload"], c["path"]) == (workload, path)]
    return float(cell["peak_bytes"]) / 1e6


PAGE.says(
    "takes {} MB beyond its inputs as FlashDiffAttn_2 and {} MB as plain attention",
    _megabytes("FlashDiffAttn_2"),
    _megabytes("DIFF, eager"),
)
PAGE.says(
    "it takes {} MB in the form that runs by itself, and {} MB in the plain one",
    _megabytes("DIFF, simulated logits 8:row"),
    _megabytes("DIFF, simulated logits 8:row, eager"),
)
PAGE.says(
    "runs at {} to {} of the Transformer's throughput as DIFF V1 and {} to {} as DIFF V2",
    *_throughput("DIFF V1"),
    *_throughput("DIFF V2"),
)
PAGE.says(
    "had {} to {} and {} to {}",
    *_throughput("DIFF V1", "bench-2026-11-20"),
    *_throughput("DIFF V2", "bench-2026-11-20"),
)
PAGE.leaves("one 830M layer over 2,048 tokens", "a shape")
PAGE.leaves("malloc hid 59 of 152 of them", "a count over figures that are withdrawn")

PAGE.leaves("830M to 13.1B", "the paper's sizes")
