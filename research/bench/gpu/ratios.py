"""Ratios that a GPU must show: each of two paths in one run, taken twice, against its aim.

    PYTHONPATH=. python -m research.bench.gpu --json gpu.json

Needs torch, triton and numpy alone; what generates text end to end says that it needs transformers too. Each group
runs in a process of its own, so that one that fails takes no other with it: first all once, side by side, which
compiles what they need, then one after the other, and what is measured is written after each. A run goes on from its
file if that is of the same commit. Ratios are medians over paired turns. Exit code 4 where an aim is missed, 3 where a
cell could not be measured.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from diffquant.benchmarks.contest import format_error
from diffquant.benchmarks.measuring import TURN_MS, describe_environment
from diffquant.support.files import write_json
from research.bench.gpu.groups import Aim, Group, groups
from research.bench.roofline import measure_roofline

_RUNS = 2
# Generation takes most of a minute.
_SECONDS_A_GROUP = 150
_SECONDS_TO_WARM = 150
_MINUTES = 6.0
_DTYPES = ["float16", "bfloat16"]
_LATE = "no result in time"

Ceilings = dict[str, dict[str, float]]


class Apart:
    """A process of its own, which a fault or a hanging kernel takes along and no other.

    Attributes:
        problem: what went wrong, once something did; nothing is called after that.
    """

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self.problem: str | None = None

    def start(
        self, function: Callable[..., Any], arguments: Sequence[Any], turn_ms: float = TURN_MS["cuda"]
    ) -> Future[Any] | None:
        """Call a function there, with turns of at least so long on a GPU; None after a problem."""
        return self._pool.submit(_alone, function, tuple(arguments), turn_ms) if self.problem is None else None

    def result(self, future: Future[Any] | None, seconds: float) -> Any:
        """What a call gave within some seconds from now, or None with a problem; the process has ended then."""
        if future is None:
            return None
        try:
            return future.result(seconds)
        except Exception as error:  # the other groups go on
            self.problem = _LATE if isinstance(error, TimeoutError) else format_error(error)
            for process in list(self._pool._processes.values()):
                process.kill()
            return None

    def end(self) -> None:
        """End the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _alone(function: Callable[..., Any], arguments: tuple[Any, ...], turn_ms: float) -> Any:
    """A function's result, without the memory that its process keeps for later: others measure on the same device."""
    import torch

    TURN_MS["cuda"] = turn_ms
    result = function(*arguments)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return result


def run_group(group: Group, process: Apart) -> dict[str, Any]:
    """Cells of a group's runs and the ratios of its aims; the problem where it failed."""
    started = time.perf_counter()
    runs = [process.result(process.start(group.measure, group.arguments), _SECONDS_A_GROUP) for _ in range(_RUNS)]
    done = [run for run in runs if run is not None]
    return entry(group, done, process.problem) | {"seconds": time.perf_counter() - started}


def entry(group: Group, runs: Sequence[Sequence[dict[str, Any]]], problem: str | None) -> dict[str, Any]:
    """A group as the file holds it."""
    return {
        "group": group.name,
        "problem": problem,
        "aims": [asdict(aim) | verdict(aim, runs) for aim in group.aims],
        "references": list(group.references),
        "runs": list(runs),
        "seconds": 0.0,
    }


def verdict(aim: Aim, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Verdict on an aim: the ratio of each run, and "reached", "missed" (by any run) or "not measured" with reasons.

    "not there" with reasons where the aim does not need its peer, which did not run.
    """
    ratios, reasons = [], []
    for cells in runs:
        by_path = {cell["path"]: cell for cell in cells}
        compared = [by_path.get(name, {"missing": "not run"}) for name in (aim.path, aim.other)]
        if all("values" in cell for cell in compared):
            turns = zip(compared[1]["values"], compared[0]["values"], strict=True)
            ratios.append(median(other / own for other, own in turns))
        reasons += [
            f"{name}: {cell.get('missing')}"
            for name, cell in zip((aim.path, aim.other), compared, strict=True)
            if "values" not in cell
        ]
    if not ratios or len(ratios) < len(runs):
        is_there = any("values" in cell for cells in runs for cell in cells if cell["path"] == aim.path)
        state = "not there" if is_there and not aim.needs_other else "not measured"
        return {"ratios": ratios, "state": state, "reasons": list(dict.fromkeys(reasons))}
    return {"ratios": ratios, "state": "reached" if min(ratios) >= aim.at_least else "missed"}


def group_text(group: dict[str, Any], ceilings: Ceilings | None = None) -> str:
    """Text of a group: each aim with its ratios, then every path's times, memory, and ratios to its references."""
    lines = [
        f"{group['group']}  ({group['seconds']:.0f} s)" + (f"  FAILED: {group['problem']}" if group["problem"] else "")
    ]
    for aim in group["aims"]:
        ratios = ", ".join(f"{ratio:.2f}x" for ratio in aim["ratios"]) or "-"
        lines.append(
            f"  {aim['state']:12} {ratios:16} aim {aim['at_least']:.2f}x  {aim['path']}  against  {aim['other']}"
        )
        lines += [f"               {reason}" for reason in aim.get("reasons", ())]
    medians = medians_by_path(group["runs"])
    for cell in group["runs"][0] if group["runs"] else ():
        if cell["path"] in medians:
            lines.append(_path_text(cell, medians, group["references"], ceilings))
        else:
            lines.append(f"      {'-':>22}  {cell['path']}: {cell.get('missing')}")
    return "\n".join(lines)


def medians_by_path(runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float]]:
    """Median of each run by path, for those that were measured in all of them."""
    medians: dict[str, list[float]] = {}
    for cell in (cell for cells in runs for cell in cells if "median" in cell):
        medians.setdefault(cell["path"], []).append(cell["median"])
    return {path: values for path, values in medians.items() if len(values) == len(runs)}


def _path_text(
    cell: dict[str, Any], medians: dict[str, list[float]], references: Sequence[str], ceilings: Ceilings | None
) -> str:
    path = cell["path"]
    own = median(medians[path])
    said = [", ".join(f"{value:.4g}" for value in medians[path]).rjust(22), path]
    said += [
        f"{median(medians[other]) / own:.2f}x {other}" for other in references if other in medians and other != path
    ]
    if "tokens_a_second" in cell:
        said.append(f"{cell['tokens_a_second']:.1f} tokens a second")
    if "peak_bytes" in cell:
        said.append(f"{cell['peak_bytes'] / 1e6:.0f} MB")
    if "error" in cell:
        said.append(f"error {cell['error']:.1e}")
    return "      " + "  ".join(said + _shares_of_ceilings(cell, own, ceilings))


def _shares_of_ceilings(cell: dict[str, Any], milliseconds: float, ceilings: Ceilings | None) -> list[str]:
    """Shares of the device's speed in a matrix product and in a copy that a cell reaches."""
    if ceilings is None or "workload" not in cell:
        return []
    shares = []
    operations_a_second = ceilings["matmul"].get(cell["workload"].rsplit(", ", 1)[-1])
    if operations_a_second and "operations" in cell:
        shares.append(
            f"{cell['operations'] / milliseconds * 1e3 / operations_a_second:.0%} of a matrix product's speed"
        )
    if "bytes" in cell:
        shares.append(f"{cell['bytes'] / milliseconds * 1e3 / ceilings['copy']['bytes a second']:.0%} of a copy's")
    return shares


def main() -> int:
    """Measure all groups, print them, and give the exit code."""
    # Not typer: a machine with a GPU may have torch, triton and numpy alone.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, dest="file", help="where to write everything, after each group")
    parser.add_argument("--only", default="", help="groups whose name contains this")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="begin no group after this many")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device that torch can use")
    chosen = [group for group in groups() if options.only in group.name]
    result = measure_all(chosen, options.file, 60 * options.minutes)
    states = [aim["state"] for group in result["groups"] for aim in group["aims"]]
    print({state: states.count(state) for state in sorted(set(states))})
    return 3 if "not measured" in states else 4 if "missed" in states else 0


def measure_all(chosen: Sequence[Group], file: Path | None, seconds: float, device: str = "cuda") -> dict[str, Any]:
    """Everything about some groups, printed and written after each; none is begun when the time is over.

    Groups that the file has of the same commit without a problem are not measured again.
    """
    import torch

    started = time.perf_counter()
    described = describe_environment() | {"cudnn": torch.backends.cudnn.version()}
    before = _measured_before(file, described["commit"])
    processes = _warmed([group for group in chosen if group.name not in before])
    roofline = Apart()
    ceilings: Ceilings | None = roofline.result(roofline.start(measure_roofline, (device, _DTYPES)), _SECONDS_A_GROUP)
    roofline.end()
    result: dict[str, Any] = {
        "environment": described,
        "ceilings": ceilings if ceilings is not None else {"problem": roofline.problem},
        "groups": [],
    }
    print(f"ceilings: {json.dumps(result['ceilings'])}", flush=True)
    for group in chosen:
        if group.name in before:
            result["groups"].append(before[group.name])
        else:
            process, over = processes.pop(0), time.perf_counter() - started > seconds
            result["groups"].append(entry(group, (), "the time was over") if over else run_group(group, process))
            process.end()
        print(group_text(result["groups"][-1], ceilings), flush=True)
        if file:
            write_json(file, result)
    return result


def _measured_before(file: Path | None, commit: str | None) -> dict[str, dict[str, Any]]:
    """The groups by name that a file has of this commit, without those that had a problem."""
    if file is None or not file.exists():
        return {}
    earlier = json.loads(file.read_text(encoding="utf-8"))
    if commit is None or earlier["environment"]["commit"] != commit:
        return {}
    return {group["group"]: group for group in earlier["groups"] if group["problem"] is None}


def _warmed(chosen: Sequence[Group]) -> list[Apart]:
    """Processes that have run their group once, all side by side: kernels are compiled, and imports done.

    A group that failed has a new one, since it may have lacked memory beside the others; one that hangs has none.
    """
    processes = [Apart() for _ in chosen]
    began = time.monotonic()
    futures = [
        process.start(group.measure, group.arguments, turn_ms=0.0)
        for group, process in zip(chosen, processes, strict=True)
    ]
    for process, future in zip(processes, futures, strict=True):
        process.result(future, max(0.0, began + _SECONDS_TO_WARM - time.monotonic()))
    failed = [process.problem not in (None, _LATE) for process in processes]
    print(f"{len(chosen)} groups ran once, side by side, in {time.monotonic() - began:.0f} s", flush=True)
    return [Apart() if again else process for again, process in zip(failed, processes, strict=True)]


if __name__ == "__main__":
    raise SystemExit(main())
