"""Ratios that a GPU must show: each of two paths in one run, taken twice, against its aim.

    PYTHONPATH=. python -m diffquant.bench.gpu --json gpu.json

Needs torch, triton and numpy alone. Each group runs in a process of its own, so that one that fails takes no
other with it. Exit code 4 where an aim is missed, 3 where a cell could not be measured.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diffquant.bench.contest.peers import failure
from diffquant.bench.environment import environment

_TURNS = 5
_RUNS = 2
_SECONDS_A_GROUP = 150
FP16, INT8, FP8 = "DIFF, fused", "DIFF, fused, int8 QK", "DIFF, fused, int8 QK, fp8 PV"
CUDNN, FOUR = "Transformer, SDPA cuDNN", "FlashDiffAttn_2, SDPA cuDNN"
TWO = "FlashDiffAttn_1, SDPA mem-efficient"
ROUNDED, ROUNDED_EAGERLY = "DIFF, simulated logits 8:row", "DIFF, simulated logits 8:row, eager"
FLASH_TWO = "FlashDiffAttn_1, SDPA flash, keys padded"


@dataclass(frozen=True)
class Aim:
    """Ratio that is to be reached: `path` is at least so many times as fast as `other`.

    Attributes:
        at_least: ratio below which the aim is missed.
        hoped: ratio that would be better still.
    """

    path: str
    other: str
    at_least: float
    hoped: float | None = None


@dataclass(frozen=True)
class Group:
    """Group of aims that share a workload.

    Attributes:
        measure: function of `arguments` that gives cells, in a process of its own.
        arguments: arguments of `measure`.
    """

    name: str
    aims: tuple[Aim, ...]
    measure: Callable[..., list[dict[str, Any]]]
    arguments: tuple[Any, ...]


def attention_cells(
    section: str, queries: int, keys: int, batch: int, dtype: str, graph: bool, peers: Sequence[str]
) -> list[dict[str, Any]]:
    """Cells of a V1 attention of the 3B model's shape: 12 pairs, d 128, dv 256."""
    from diffquant.bench.contest.contest import Contest
    from diffquant.bench.contest.workloads import Workload, model_named

    work = Workload(model_named("3B"), queries, keys, batch, dtype)
    return [_to_dict(cell) for cell in Contest(section, "cuda", _TURNS, tuple(peers), graph).run([work])]


def linear_cells(graph: bool) -> list[dict[str, Any]]:
    """Cells of every path of a linear layer of the 3B model, at one token."""
    from diffquant.bench.contest import linears
    from diffquant.bench.contest.workloads import model_named

    cells = linears.run_linears([model_named("3B")], (1,), "float16", "cuda", _TURNS, graph=graph)
    return [_to_dict(cell) for cell in cells]


def state_cells(context: int) -> list[dict[str, Any]]:
    """Cells of the 3B model's cache at a context, in megabytes of all layers as torch's allocator counts them."""
    import torch

    from diffquant.bench.contest import kernels
    from diffquant.bench.contest.decode import RECIPES
    from diffquant.bench.contest.workloads import Workload, differential, model_named

    model = model_named("3B")
    call = differential(Workload(model, 1, context, 1, "float16"), "cuda")
    cells = []
    for bits in (16, 8, 6, 4):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        stores = [kernels.stored(call, RECIPES[bits]) for _ in range(model.layers)]
        allocated = torch.cuda.memory_allocated() - before
        stored = sum(store.nbytes for store in stores)
        cells.append(
            {
                "path": f"{bits}-bit state",
                "median": allocated / 1e6,
                "values": [allocated / 1e6],
                "stored_bytes": stored,
            }
        )
        del stores
    return cells


def groups() -> list[Group]:
    """All groups, the one of greatest interest first."""
    planned = [
        Group(
            "prefill V1, 16K tokens, float16: 8 bits",
            (Aim(FP8, CUDNN, 1.0, 1.25), Aim(INT8, CUDNN, 1.0, 1.25)),
            attention_cells,
            ("attention", 16384, 16384, 1, "float16", False, (FP8, INT8, FP16, CUDNN)),
        )
    ]
    planned += [
        Group(
            f"prefill V1, {length} tokens, {dtype}",
            (Aim(FP16, FOUR, 1.3), Aim(FP16, TWO, 2.0)),
            attention_cells,
            ("attention", length, length, 1, dtype, False, (FP16, FOUR, TWO, CUDNN)),
        )
        for length in (4096, 8192, 16384)
        for dtype in ("float16", "bfloat16")
    ]
    planned.append(
        Group(
            "simulated logits 8:row, V1, 8K tokens, bfloat16",
            (Aim(ROUNDED, FP16, 1 / 1.6), Aim(ROUNDED, ROUNDED_EAGERLY, 10.0)),
            attention_cells,
            ("attention", 8192, 8192, 1, "bfloat16", False, (ROUNDED, ROUNDED_EAGERLY, FP16)),
        )
    )
    cache = "DIFF, fused, {}-bit cache".format
    aims = (
        Aim(cache(4), cache(16), 3.0),
        Aim(cache(4), FLASH_TWO, 4.5),
        Aim(cache(8), cache(16), 1.8),
        Aim(cache(6), cache(16), 2.3),
    )
    for graph in (False, True):
        how = ", CUDA graphs" if graph else ""
        peers = (*map(cache, (16, 8, 6, 4)), FLASH_TWO, "FlashDiffAttn_2, SDPA flash", CUDNN)
        arguments = ("decode", 1, 16384, 8, "float16", graph, peers)
        planned.append(Group(f"decode V1, context 16K, batch 8, float16{how}", aims, attention_cells, arguments))
    for graph in (False, True):
        how = ", CUDA graphs" if graph else ""
        linear = (Aim("packed, 4 bits", "dense", 3.0), Aim("packed, 6 bits", "dense", 2.2))
        planned.append(Group(f"linear 3072 -> 8192, 1 token, float16{how}", linear, linear_cells, (graph,)))
    state = (Aim("4-bit state", "16-bit state", 1 / 0.30),)
    return [*planned, Group("attention state of the 3B model at 32K tokens (MB)", state, state_cells, (32768,))]


def run_group(group: Group) -> dict[str, Any]:
    """Cells of a group's runs and the ratios of its aims; the problem where it failed."""
    started = time.perf_counter()
    runs: list[list[dict[str, Any]]] = []
    problem = None
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    try:
        for _ in range(_RUNS):
            cells = pool.submit(group.measure, *group.arguments).result(_SECONDS_A_GROUP)
            runs.append(cells)  # a run that fails keeps those before it
    except Exception as error:  # the other groups go on
        problem = failure(error)
        for process in list(pool._processes.values()):
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    aims = [asdict(aim) | verdict(aim, runs) for aim in group.aims]
    return {
        "group": group.name,
        "problem": problem,
        "aims": aims,
        "runs": runs,
        "seconds": time.perf_counter() - started,
    }


def verdict(aim: Aim, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Verdict on an aim: the ratio of each run, and "reached", "missed" (by any run) or "not measured" with reasons."""
    ratios, reasons = [], []
    for cells in runs:
        by_path = {cell["path"]: cell for cell in cells}
        compared = [by_path.get(name, {"missing": "not run"}) for name in (aim.path, aim.other)]
        if all("median" in cell for cell in compared):
            ratios.append(compared[1]["median"] / compared[0]["median"])
        reasons += [
            f"{name}: {cell.get('missing')}"
            for name, cell in zip((aim.path, aim.other), compared, strict=True)
            if "median" not in cell
        ]
    if not ratios or len(ratios) < len(runs):
        return {"ratios": ratios, "state": "not measured", "reasons": list(dict.fromkeys(reasons))}
    return {"ratios": ratios, "state": "reached" if min(ratios) >= aim.at_least else "missed"}


def group_text(group: dict[str, Any]) -> str:
    """Text of a group: each aim with its ratios, then every path's times."""
    lines = [
        f"{group['group']}  ({group['seconds']:.0f} s)" + (f"  FAILED: {group['problem']}" if group["problem"] else "")
    ]
    for aim in group["aims"]:
        ratios = ", ".join(f"{ratio:.2f}x" for ratio in aim["ratios"]) or "-"
        hoped = f" (hoped {aim['hoped']:.2f}x)" if aim["hoped"] else ""
        lines.append(
            f"  {aim['state']:12} {ratios:16} aim {aim['at_least']:.2f}x{hoped}  {aim['path']}  against  {aim['other']}"
        )
        lines += [f"               {reason}" for reason in aim.get("reasons", ())]
    for cell in group["runs"][0] if group["runs"] else ():
        if "median" in cell:
            medians = ", ".join(
                f"{c['median']:.4g}"
                for cells in group["runs"]
                for c in cells
                if c["path"] == cell["path"] and "median" in c
            )
            error = f"  error {cell['error']:.1e}" if "error" in cell else ""
            lines.append(f"      {medians:>22}  {cell['path']}{error}")
    return "\n".join(lines)


def _to_dict(cell: Any) -> dict[str, Any]:
    entry = {name: value for name, value in asdict(cell).items() if value not in (None, {}, ())}
    return entry | ({"median": cell.spread.median} if cell.spread else {})


def main() -> int:
    """Measure all groups, print them, and give the exit code."""
    # Not typer: a machine with a GPU may have torch, triton and numpy alone.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, dest="file", help="where to write everything")
    parser.add_argument("--only", default="", help="groups whose name contains this")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use")
    result: dict[str, Any] = {"environment": environment(), "turns": _TURNS, "groups": []}
    for group in groups():
        if options.only in group.name:
            result["groups"].append(run_group(group))
            print(group_text(result["groups"][-1]), flush=True)
        if options.file:
            options.file.write_text(json.dumps(result, indent=1) + "\n")
    states = [aim["state"] for group in result["groups"] for aim in group["aims"]]
    print({state: states.count(state) for state in sorted(set(states))})
    return 3 if "not measured" in states else 4 if "missed" in states else 0


if __name__ == "__main__":
    raise SystemExit(main())
