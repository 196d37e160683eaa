"""The figures of docs/kernels.md, an H100's."""

from collections import Counter
from statistics import median
from typing import Any

from research.check.page import Expected, Page, Unmeasured
from research.check.raw import raw

PAGE = Page("docs/kernels.md", is_guide=True)
PAGE.leaves("within limits of 2 % for int8 and 8 % for e4m3", "the tests' limits")
PAGE.leaves("of 16K tokens its output", "a size that was chosen")
PAGE.leaves("(2d + dv) · 2 bytes per token", "arithmetic")
PAGE.leaves("a thread reads 16 bytes", "how a kernel is built")
PAGE.leaves("Up to 1,024 tokens, a GEMM", "how a kernel is built")
PAGE.leaves("A thread loads 16 bytes", "how a kernel is built")
PAGE.leaves("channels of a token, 16 bytes", "how a kernel is built")
PAGE.leaves("chunks of 512 bytes", "how a kernel is built")
PAGE.leaves("for 3,072 columns at 4 bits", "a size that was chosen")
PAGE.leaves("on Hopper (Triton 3.9)", "a version")
PAGE.leaves("What Triton 3.9.0's assembler", "a version")
PAGE.leaves("Triton 3.6 takes V's scales", "a version")
PAGE.leaves("Triton before 3.7 this starts", "a version")
PAGE.leaves("those of Triton 3.6.0", "a version")
PAGE.leaves("with Triton 3.6.0 as well", "a version")
PAGE.leaves("with the installed Triton or 3.6.0", "a version")
PAGE.table(
    "device | configurations | what differs",
    Unmeasured("names of devices and versions, what launch code does, and machine code that a test reads"),
)
PAGE.table(
    "machine code of the loop | before, 4 bits | now, 4 bits | before, 16 bits | now, 16 bits",
    Unmeasured("machine code of two versions; tests/kernels/test_decode_compiled.py bounds the newer's"),
)

PAGE.leaves(
    "1.25 times the instructions of one of `row`", "machine code, which tests/kernels/test_decode_compiled.py bounds"
)

_H100 = raw("h100/ratios.json")
_GROUPS = {group["group"]: group for group in _H100["groups"]}


def _group(begins: str) -> dict[str, Any]:
    """The group of that name, or the first whose name begins so."""
    return _GROUPS.get(begins) or next(entry for name, entry in _GROUPS.items() if name.startswith(begins))


def _milliseconds(group: str, path: str) -> float:
    """Median over the runs of a path's medians."""
    runs = _group(group)["runs"]
    return median(cell["median"] for cells in runs for cell in cells if cell["path"] == path)


_LONG, _8BIT = "prefill V1, 16384 tokens", "prefill V1, 16K tokens, float16"
_NARROW, _OF_V2, _ROUNDED = "prefill V1, d 64", "prefill V2", "simulated logits"
_DECODE = "decode V1, context 16K, batch 8, float16, CUDA graphs"
_FROM_PAGES, _ONE_TOKEN = "decode V1 from pages", "linear 3072 -> 8192, 1 token, float16, CUDA graphs"
_CUDNN, _TWO = "Transformer, SDPA cuDNN", "FlashDiffAttn_1, SDPA cuDNN"
_SPECIALIZED, _FUSED = "DIFF, fused, specialized", "DIFF, fused"
# Each row's group, path and rival.
_MEASURED = {
    "prefill in fp8, specialized, 16K": (_8BIT, "DIFF, fused, int8 QK, fp8 PV, specialized", _CUDNN),
    "the same": (_8BIT, "DIFF, fused, int8 QK, fp8 PV, specialized", "Transformer, SDPA flash"),
    "fused fp16 prefill, specialized, 16K": (_LONG, _SPECIALIZED, "FlashDiffAttn_2, SDPA cuDNN"),
    "the same, 16K": (_LONG, _SPECIALIZED, _TWO),
    "the same, 16K in float16": (_8BIT, _SPECIALIZED, _CUDNN),
    "fused fp16 prefill, 16K": (_LONG, _FUSED, _TWO),
    "fused fp16 prefill, d = 64, 8K": (_NARROW, _FUSED, _TWO),
    "fused prefill of V2, 8K": (_OF_V2, _FUSED, "FlashDiffAttn_1"),
    "the same, specialized": (_OF_V2, _SPECIALIZED, "FlashDiffAttn_1"),
    "simulated logits 8:row, 8K": (_ROUNDED, "DIFF, simulated logits 8:row", _FUSED),
    "simulated logits 8:row:shift, 8K": (_ROUNDED, "DIFF, simulated logits 8:row:shift", _FUSED),
    "decoding from a 4-bit cache, 8 × 16K": (_DECODE, "DIFF, fused, 4-bit cache", "DIFF, fused, 16-bit cache"),
    "the same, 4 bits": (_DECODE, "DIFF, fused, 4-bit cache", "Transformer, SDPA flash"),
    "decoding from 4-bit pages, 8 × 16K": (_FROM_PAGES, "4-bit pages", "DIFF, fused, 16-bit cache"),
    "decoding from 16-bit pages, 8 × 16K": (_FROM_PAGES, "16-bit pages", "DIFF, fused, 16-bit cache"),
    "4-bit linear layer, 1 token": (_ONE_TOKEN, "packed, 4 bits", "dense"),
    "4-bit linear layer, 16 tokens": ("linear 3072 -> 8192, 16 tokens", "packed, 4 bits", "dense"),
    "4-bit linear layer, 64 tokens": ("linear 3072 -> 8192, 64 tokens", "packed, 4 bits", "dense"),
}


def _of_card(row: str, column: str) -> list[Expected]:
    group, path, other = _MEASURED[row]
    if column == "times as fast":
        return [_milliseconds(group, other) / _milliseconds(group, path)]
    if column == "against":
        return []
    return [aim["at_least"] for aim in _group(group)["aims"] if (aim["path"], aim["other"]) == (path, other)]


PAGE.table("path | against | times as fast | aim", _of_card)
AIMS = [aim["state"] for entry in _H100["groups"] for aim in entry["aims"]]
PAGE.means("Two of the aims are missed", AIMS.count("missed") == 2)
_PRODUCTS, _COPY = _H100["ceilings"]["matmul"], _H100["ceilings"]["copy"]["bytes a second"]


def _cell(group: str, path: str) -> dict[str, float]:
    return next(cell for cell in _group(group)["runs"][0] if cell["path"] == path)


def _share_of_copy(group: str, path: str) -> float:
    """Bytes that a path moves a second, beside those of a copy."""
    return _cell(group, path)["bytes"] / (_milliseconds(group, path) / 1e3) / _COPY


PAGE.says(
    "its output was {} % off plain float32 in int8 and {} % in e4m3",
    *(100 * _cell(_8BIT, path)["error"] for path in ("DIFF, fused, int8 QK", "DIFF, fused, int8 QK, fp8 PV")),
)
_OPERATIONS = _cell(_8BIT, _CUDNN)["operations"]
PAGE.says(
    "cuDNN reaches {} % of the card's own matrix-product speed",
    100 * _OPERATIONS / (_milliseconds(_8BIT, _CUDNN) / 1e3) / _PRODUCTS["float16"],
)
PAGE.says("and our fp8 form {} of its speed", *_of_card("prefill in fp8, specialized, 16K", "times as fast"))
PAGE.means(
    "The 4-bit GEMV moves its codes at half the speed of a copy",
    0.45
    < _cell(_ONE_TOKEN, "packed, 4 bits")["bytes"] / (_milliseconds(_ONE_TOKEN, "packed, 4 bits") / 1e3) / _COPY
    < 0.55,
)
_EAGER_LINEAR = "linear 3072 -> 8192, 1 token, float16"
_OF_DENSE = [
    cells["packed, 4 bits"] / cells["dense"]
    for run in _group(_EAGER_LINEAR)["runs"]
    for cells in [{cell["path"]: cell.get("median") for cell in run}]
]
PAGE.says("took {} times as long as a dense one. That is the second run", _OF_DENSE[1])
_NOISY = next(cell["values"] for cell in _group(_EAGER_LINEAR)["runs"][0] if cell["path"] == "packed, 4 bits")
PAGE.says("the five turns of the first differ by {} times", max(_NOISY) / min(_NOISY))
_PLAINLY = "DIFF, simulated logits 8:row, eager"
PAGE.says(
    "Simulated logits in 8K tokens take {} MB, and plain PyTorch takes {} GB and {} times as long",
    _cell(_ROUNDED, "DIFF, simulated logits 8:row")["peak_bytes"] / 1e6,
    _cell(_ROUNDED, _PLAINLY)["peak_bytes"] / 1e9,
    _milliseconds(_ROUNDED, _PLAINLY) / _milliseconds(_ROUNDED, "DIFF, simulated logits 8:row"),
)
_STATE = "attention state"
PAGE.says(
    "a 4-bit cache takes {} times less memory than a 16-bit one",
    _milliseconds(_STATE, "16-bit state") / _milliseconds(_STATE, "4-bit state"),
)
_MOTIF = "decode Motif-3 from latents"
PAGE.says(
    "from latents takes {} ms a layer at 16 bits, {} ms at 8, {} ms at 6 and {} ms at 4",
    *(_milliseconds(_MOTIF, f"{bits}-bit latents") for bits in (16, 8, 6, 4)),
)
PAGE.leaves("ms a layer at 16 bits", "a width")
PAGE.leaves("At 16 and 4 bits that moves", "widths")
PAGE.means(
    "moves a fifth and a twentieth of what a copy moves meanwhile",
    [round(_share_of_copy(_MOTIF, f"{bits}-bit latents"), 2) for bits in (16, 4)] == [0.19, 0.05],
)
PAGE.leaves("(8 sequences of 16K tokens)", "sizes that were chosen")
PAGE.leaves("SmolLM2-135M as a Transformer and as DIFF V2, 400 items at 14 settings", "what was asked for")
PAGE.leaves("one H100 with Triton 3.6 and torch 2.11", "versions")
PAGE.leaves("in all, with Triton 3.6:", "a version")
PAGE.leaves("At 16 tokens that is the GEMV itself; from 17 on Triton 3.6", "how a kernel is built, and a version")
_AT_16 = {
    cell["path"]: cell["median"] for cell in _group("linear 3072 -> 8192, 16 tokens")["runs"][0] if cell.get("median")
}
PAGE.means(
    "4 bits are slower than dense products from 16 tokens on, and so are 8 and 6 bits",
    all(_AT_16[f"packed, {bits} bits"] > _AT_16["dense"] for bits in (8, 6, 4)),
)
PAGE.leaves("4 bits are slower than dense products", "widths")
PAGE.leaves("Triton 3.6.0, which the H100 ran", "a version")
PAGE.leaves("4-bit GEMV moves", "a width")
PAGE.says("An H100 measured {} of the {} groups", sum(bool(g["runs"]) for g in _H100["groups"]), len(_H100["groups"]))
_TESTED = [entry["tests"] for entry in raw("h100/tests.json")["runs"]]
_LAST = {test: outcome for tests in _TESTED for test, (outcome, *_) in tests.items()}
OUTCOMES = Counter(_LAST.values())
PAGE.says("The {} tests of `tests/gpu` ran in two runs", len(_LAST))
PAGE.says("{} ran on the older code only", len(_TESTED[0].keys() - _TESTED[1].keys()))
PAGE.says("last run\n{} passed, {} were skipped and {} failed", *(OUTCOMES[x] for x in ("passed", "skipped", "failed")))
_FAILED = Counter(test.split("::")[0] for test, outcome in _LAST.items() if outcome == "failed")
PAGE.says("{} tests failed; repaired between the runs", sum(outcome == "failed" for outcome, *_ in _TESTED[0].values()))
PAGE.says("step alive: {} tests", _FAILED["test_graphed_steps.py"] - 1)
PAGE.says("sampling refused: {} test", sum("recording_fails" in t for t, o in _LAST.items() if o == "failed"))
PAGE.says("in few of many launches: {} test", _FAILED["test_specialized.py"])
PAGE.leaves("rows that see no key took weights of whole blocks, which overflow, times 0", "arithmetic")

_RECORD = raw("compiled-kernels.json")["compiled"]
# Two compilers for six cards: a call is in the table once it has been through all.
_COMPILED = {name: cells for name, cells in _RECORD.items() if len(cells) == 12}
_CELLS = [cell for cells in _RECORD.values() for cell in cells.values() if cell]


def _compiled(kernel: str, card: str) -> list[Expected]:
    """How many calls of a kernel compiled for a card, and of how many; nothing where the launch code refuses them."""
    calls = [cells for name, cells in _COMPILED.items() if _kernel_of(name) == kernel]
    made = [cells[f"{triton} {card}"] is not None for cells in calls for triton in ("installed", "3.6.0")]
    return [sum(made), len(made)] if any(made) else []


def _kernel_of(call: str) -> str:
    name = call.rpartition(", v")[0] or call
    return (
        name.split()[0]
        if name.split()[0] in ("decode", "paged", "latents", "append", "GEMV", "GEMM", "expand")
        else name
    )


PAGE.table("kernel | sm_80 | sm_86 | sm_89 | sm_90 | sm_100 | sm_120", _compiled)
PAGE.leaves("by Triton 3.9.0 and by 3.6.0", "versions")
PAGE.says("They are {} calls", len(_RECORD))
PAGE.means(
    "and the file says which code each compiled",
    len(_COMPILED) == len(_RECORD) and all("source" in cell for cell in _CELLS),
)


def _calls_with(fault: str) -> list[str]:
    return [
        f"{name}, {where}" for name, cells in _COMPILED.items() for where, cell in cells.items() if cell and cell[fault]
    ]


PAGE.says("the stack in {} of all compilations", len(_calls_with("spilling")))
PAGE.means(
    "The others are V2's paged decode at d = 128 with 6- and 4-bit keys in blocks of 64",
    {call.rpartition(", ")[0] for call in _calls_with("spilling") if ", v1 128, " not in call}
    == {
        "paged 6:c64 keys, v2 128",
        "paged 4:c64 keys, v2 128",
        "latents 4 bits, 4:c64 keys",
        "latents 8 bits",
        "latents 4 bits",
        "GEMV nvfp4",
        "simulated logits of rounded operands, v1 64",
    },
)
PAGE.leaves("by Triton 3.6.0 for Hopper, latents at 8 and 4 bits", "a version and widths")
PAGE.means(
    "The two whose operands are overwritten, GEMMs at 8 and 4 bits for sm_90",
    sorted(_calls_with("overwritten")) == ["GEMM 4 bits, 3.6.0 sm_90", "GEMM 8 bits, 3.6.0 sm_90"],
)
PAGE.leaves("for sm_80 by Triton 3.6.0, int8", "a version")
PAGE.leaves("fp8 kernel by Triton 3.9.0", "a version")
PAGE.leaves("for sm_90 by Triton 3.6.0", "a version")
PAGE.leaves("GEMMs at 8 and 4 bits", "widths")

_RUNS = raw("ptx-runs.json")


def _run(run: str, column: str) -> list[Expected]:
    installed = f"Triton {_RUNS['environment']['versions']['triton']}"
    name = run.replace(installed, "Triton installed")
    kernels = _RUNS["runs"][name]["kernels"].values()
    if column == "tests passed":
        return [len(_RUNS["runs"][name]["tests"])]
    if column == "minutes":
        return [sum(_RUNS["runs"][name]["tests"].values()) / 60]
    return [sum(kernel[column] for kernel in kernels)]


PAGE.table("run | tests passed | minutes | launches | instructions", _run)
