"""Measurement of the time and peak memory of calls.

Timed calls alternate, A B A B, so that other load on the machine affects all of them. A process's memory is measured by
Linux, a CUDA device's by torch's allocator.
"""

import ctypes
import datetime
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from diffquant.errors import UsageError
from diffquant.support.installation import __version__, find_commit, installed_version
from diffquant.support.machine import cores

# Least duration of a turn in ms, which repeats a call, so that timer resolution and launch overhead do not matter, and
# that a GPU runs at the clocks that its power allows for long.
TURN_MS = {"cpu": 20.0, "cuda": 200.0}
_WARM_UPS = 2

Work = Callable[[], object]
# Result of a turn: a time, or another measurement.
Turn = TypeVar("Turn")
Name = TypeVar("Name")
# Large compared with what Linux may omit from a peak, in bytes.
_KNOWN = 1 << 22
# mallopt's M_MMAP_THRESHOLD, and its value: blocks from half a page on get their own pages.
_MMAP_THRESHOLD, _OWN_PAGES_FROM = -3, 2048


def make_timer(work: Work, device: str = "cpu", *, graph: bool = False) -> Callable[[], float]:
    """Warm up a call, and return a function that repeats it for a turn and returns the time per call in ms.

    Args:
        work: the call to time.
        device: "cpu", or "cuda" for timing with CUDA events.
        graph: whether to replay the call as a CUDA graph, without the host's launch overhead.

    Raises:
        UsageError: `graph` is true and the device is the CPU.
    """
    if graph and device != "cuda":
        raise UsageError("only CUDA devices have graphs")
    for _ in range(_WARM_UPS):
        work()
    run = _cuda_run(_capture(work) if graph else work) if device == "cuda" else _host_run(work)
    once = max(run(1), 1e-4)
    count = max(1, ceil(TURN_MS[device] / once))
    return lambda: run(count) / count


def run_in_turns(calls: Mapping[Name, Callable[[], Turn]], repeats: int) -> dict[Name, list[Turn]]:
    """Run all calls alternately, A B A B, `repeats` times each; return a list of results for each call, by name."""
    turns: dict[Name, list[Turn]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            turns[name].append(call())
    return turns


def _host_run(work: Work) -> Callable[[int], float]:
    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - started) * 1e3

    return run


def _cuda_run(work: Work) -> Callable[[int], float]:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(count: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return run


def _capture(work: Work) -> Work:
    import torch

    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        # Keeps the captured call alive: the graph has only the addresses of its tensors.
        _ = work
        graph.replay()

    return replay


def measure_resident_bytes(process: int | str = "self") -> tuple[int, int]:
    """Return the peak and the current memory of a process in bytes; both are 0 for a zombie process.

    Returns:
        The peak resident set size, mapped files included, and the current resident set size without mapped files.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{process}/status").read_text()
    return parse_status_bytes(status, "VmHWM"), parse_status_bytes(status, "RssAnon")


def parse_status_bytes(status: str, name: str) -> int:
    """Return a size in bytes from the text of a /proc/PID/status file; 0 if it has no such line.

    Args:
        name: name of the line, such as "VmHWM".
    """
    values = (line.split()[1] for line in status.splitlines() if line.startswith(name + ":"))
    return 1024 * int(next(values, "0"))


def allocate_separate_pages() -> None:
    """Make malloc of this process allocate each block as separate pages, which are released when the block is freed.

    Otherwise malloc reuses freed memory, and a call's allocations do not change the number of resident pages.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _OWN_PAGES_FROM)


def measure_cpu_peak(call: Callable[[], Any]) -> int:
    """Return the peak growth of this process's resident memory during a call in bytes, its result included.

    The process must have called `allocate_separate_pages` first. Linux's count is accurate to a quarter of a megabyte.

    Raises:
        OSError: this is not Linux.
    """
    ctypes.CDLL(None).malloc_trim(0)
    # Linux's VmRSS is exact, but its peak omits each core's latest pages. So the size before the call is measured as a
    # peak, too, with a block of known size.
    forget_peak()
    _fill_pages(_KNOWN)
    before = measure_resident_bytes()[0] - _KNOWN
    forget_peak()
    held = call()
    grown = measure_resident_bytes()[0] - before
    del held
    return grown


def forget_peak() -> None:
    """Make the peak memory of this process its current memory, on Linux."""
    Path("/proc/self/clear_refs").write_text("5")


def _fill_pages(nbytes: int) -> None:
    """Allocate this many bytes of new pages, write to each, and release them."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages[:: mmap.PAGESIZE] = b"1" * (nbytes // mmap.PAGESIZE)


def measure_cuda_peak(call: Callable[[], Any]) -> int:
    """Return the peak bytes that torch's CUDA allocator allocated during a call, in addition to those before it."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


_PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "compressed-tensors")

# CPUs with the same name may differ in these, and so in speed by several times.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "bf16", "sve")


def describe_environment(*packages: str) -> dict[str, Any]:
    """Return the machine, date, commit and versions of packages, the given ones included, as plain data."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": find_commit(),
        "device": _gpu_name() or _cpu_name(),
        "cpu": _cpu_name(),
        "instructions": [name for name in _INSTRUCTIONS if name in _cpu_line("flags", "Features").split()],
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {"diffquant": __version__}
        | {package: installed_version(package) or None for package in (*_PACKAGES, *packages)},
    }


def _gpu_name() -> str | None:
    """Return the CUDA device's name, or None if there is none or torch is not imported yet."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _cpu_line(*heads: str) -> str:
    """Return the first entry in /proc/cpuinfo with one of these names, or "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(heads)), "")
