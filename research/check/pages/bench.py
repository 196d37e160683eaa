"""The figures of research/pages/bench.md."""

from statistics import median

from research.check.page import Page
from research.check.raw import medians, raw

PAGE = Page("research/pages/bench.md", guides=("On a GPU",))

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

# On a GPU

[_EIGHT_BITS] = [group for group in raw("h100/ratios.json")["groups"] if group["group"].endswith(": 8 bits")]
_ERRORS = {cell["path"]: cell["error"] for run in _EIGHT_BITS["runs"] for cell in run if "error" in cell}
PAGE.says(
    "of random tensors on an H100 by {} % ({} %)",
    *(100 * _ERRORS[path] for path in ("DIFF, fused, int8 QK", "DIFF, fused, int8 QK, fp8 PV")),
)

# Quantizing and opening beside their peers

_OPENING = raw("opening.json")
PAGE.says(
    "reading all of SmolLM2's took {} s where transformers' loader took {} s in the same run (medians of {}; a ratio "
    "of {})",
    medians(_OPENING["ours"], "seconds"),
    medians(_OPENING["transformers"], "seconds"),
    len(_OPENING["ours"]),
    medians(_OPENING["transformers"], "seconds") / medians(_OPENING["ours"], "seconds"),
)
_PEERS = raw("quantize-peers.json")
_OURS, _TORCHAO = (median(_PEERS["turns"][name]["seconds"]) for name in ("diffquant quantize", "torchao in memory"))

PAGE.says(
    "`quantize` from file to file took {} s against {} s, on two cores and {} GB of bfloat16 (medians of {} turns "
    "each)",
    _OURS,
    _TORCHAO,
    _PEERS["source_bytes"] / 1e9,
    len(_PEERS["turns"]["torchao in memory"]["seconds"]),
)
PAGE.says("it was {} times as fast for each byte that is packed", _TORCHAO / _OURS)
PAGE.means("That was an AMD EPYC", "AMD EPYC" in _PEERS["environment"]["cpu"])
_BEFORE = raw("quantize-peers-2026-11-22.json")
PAGE.says(
    "on a Xeon the day before, it was {} times as fast",
    median(_BEFORE["turns"]["torchao in memory"]["seconds"])
    / median(_BEFORE["turns"]["diffquant quantize"]["seconds"]),
)
_STARTS = {name: medians(turns, "seconds") for name, turns in raw("inspect-motif-2-12.7b.json")["turns"].items()}
PAGE.says(
    "answers in {} s, {} times as long as importing torch alone",
    _STARTS["diffquant inspect"],
    raw("inspect-motif-2-12.7b.json")["ratio"],
)
PAGE.leaves("a folder of 25.4 GB", "a size that docs/quantize.md has from its raw file")
PAGE.says(
    "`tuned` took {} s on a processor without AVX-512",
    raw("quantize-roundings-8192-tokens.json")["roundings"]["tuned"]["process_seconds"],
)
PAGE.leaves("Over half the text, 8,192 tokens", "a setting")
