"""Comparison of peers on the same shapes: each is checked against `naive`, then timed alternately with the others."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext

import torch
from torch import Tensor

from diffquant.attention.naive import naive
from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.decode import DECODE_PEERS
from diffquant.benchmarks.measuring import (
    allocate_separate_pages,
    make_timer,
    measure_cpu_peak,
    measure_cuda_peak,
    run_in_turns,
)
from diffquant.benchmarks.peers import BASELINE, PEERS, Peer
from diffquant.benchmarks.workloads import Workload
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress, report_nothing

# Modules that peers import at their first call, which takes seconds, or that register further peers.
PRELOADED = ["diffquant.model.cache"]
# Each section's peers by name.
SECTIONS: Mapping[str, Mapping[str, Peer]] = {"attention": PEERS, "decode": DECODE_PEERS}

# Additional tolerance with quantized logits: codes can differ if two implementations differ in the last bit before.
_SIMULATED_SLACK = 5e-3
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_CHECKED_QUERIES = 128


@dataclass(frozen=True)
class PeerComparison:
    """A comparison of a section's peers (implementations of attention) on one device, which are checked and timed.

    Attributes:
        section: name in `SECTIONS`.
        device: "cpu" or "cuda".
        repeats: number of timed repeats of each peer.
        peers: names of the peers to run; all of the section by default. The baseline always runs.
        graph: whether to time replays of a CUDA graph.
    """

    section: str
    device: str
    repeats: int
    peers: tuple[str, ...] = ()
    graph: bool = False

    def __post_init__(self) -> None:
        known = SECTIONS[self.section]
        unknown = [name for name in self.peers if name not in known]
        if unknown:
            raise UsageError(f"unknown peer {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")

    def select_peers(self) -> dict[str, Peer]:
        """Return the peers to run, by name."""
        known = SECTIONS[self.section]
        return {name: peer for name, peer in known.items() if not self.peers or name in {BASELINE, *self.peers}}

    def run(self, workloads: Sequence[Workload], progress: Progress = report_nothing) -> list[BenchCell]:
        """Measure every peer on every workload.

        A peer is not timed if it cannot run a workload, or if its result differs from that of attention backend
        `naive` by more than the tolerance. The reason is in its cell's `missing`.
        """
        cells: list[BenchCell] = []
        for done, work in enumerate(workloads):
            progress(done, len(workloads), f"{self.section}: {work.name}")
            cells += self._times(work)
        by_name = {work.name: work for work in workloads}
        threads = torch.get_num_threads()
        return [self._add_peak(cell, by_name[cell.workload], threads) if cell.values else cell for cell in cells]

    @torch.inference_mode()
    def _times(self, work: Workload) -> list[BenchCell]:
        cells: dict[str, BenchCell] = {}
        calls: dict[str, Callable[[], float]] = {}
        for name, peer in self.select_peers().items():
            try:
                call = peer.make(work, self.device)
                cells[name] = self._check_peer(work, name, peer, call)
                if cells[name].missing is None:
                    calls[name] = make_timer(partial(peer.attention, call), self.device, graph=self.graph)
            except Exception as error:  # a peer may fail with anything, which the table reports
                cells[name] = replace(self._cell(work, name, peer), missing=format_error(error))
        times = run_in_turns(calls, self.repeats)
        return [replace(cell, values=tuple(times.get(name, ()))) for name, cell in cells.items()]

    def _check_peer(self, work: Workload, name: str, peer: Peer, call: AttentionCall) -> BenchCell:
        """Check a peer, and return its cell with its error; `missing` is the reason if it must not be timed."""
        allowed = tolerance(peer, work.torch_dtype)
        cell = replace(self._cell(work, name, peer), facts=peer.facts(call))
        if reason := peer.missing(call):
            return replace(cell, missing=reason)
        error, wrong = relative_error(peer, call), None
        if not error <= allowed:
            wrong = f"wrong result: error {error:.1e} against naive (limit {allowed:.0e}); not timed"
        return replace(cell, error=error, missing=wrong)

    def _cell(self, work: Workload, name: str, peer: Peer) -> BenchCell:
        allowed = tolerance(peer, work.torch_dtype)
        return BenchCell(self.section, work.name, name, baseline=BASELINE, length=work.keys, tolerance=allowed)

    def _add_peak(self, cell: BenchCell, work: Workload, threads: int) -> BenchCell:
        """Add peak memory, without the inputs, to a cell; on the CPU the peer runs in a new process."""
        try:
            return replace(cell, peak_bytes=self.measure_peak_memory(cell.path, work, threads))
        except Exception as error:  # such as a process that the system killed because memory ran out
            return replace(cell, values=(), missing=f"its peak memory could not be measured: {format_error(error)}")

    def measure_peak_memory(self, name: str, work: Workload, threads: int) -> int:
        """Measure the peak memory of a peer's call in bytes, without its inputs.

        Args:
            name: name of the peer.
            threads: number of torch's threads on the CPU.
        """
        if self.device == "cuda":
            peer = self.select_peers()[name]
            with torch.inference_mode():
                return measure_cuda_peak(partial(peer.attention, peer.make(work, self.device)))
        with ProcessPoolExecutor(1, _fresh_processes()) as fresh:
            return fresh.submit(measure_resident_peak, self.section, name, work, threads).result()


def _fresh_processes() -> BaseContext:
    """Return a multiprocessing context whose processes have imported what peers need, and have computed nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    return context


@torch.inference_mode()
def measure_resident_peak(section: str, name: str, work: Workload, threads: int) -> int:
    """Measure the peak memory of a peer's call on the CPU in bytes, without its inputs.

    Call it in a new process, because it changes how the process allocates memory.

    Args:
        section, name: section and name of the peer.
        threads: number of torch's threads.
    """
    allocate_separate_pages()
    torch.set_num_threads(threads)
    peer = SECTIONS[section][name]
    # A small call first loads libraries and starts threads, which do not count as a call's memory.
    few = replace(work, queries=min(16, work.queries), keys=16)
    peer.attention(peer.make(few, "cpu"))
    return measure_cpu_peak(partial(peer.attention, peer.make(work, "cpu")))


def tolerance(peer: Peer, dtype: torch.dtype) -> float:
    """Return the largest relative error against `naive` that a peer may have; with a larger one it is not timed."""
    return peer.tolerance or TOLERANCES[dtype] + (_SIMULATED_SLACK if peer.logits.quantizes else 0.0)


def relative_error(peer: Peer, call: AttentionCall) -> float:
    """Return the relative error ||peer - naive|| / ||naive|| of a peer's output for a call's first and last queries.

    Only a few queries are compared, so that `naive` need not compute whole maps. They can be computed separately
    because quantized logits have a scale per row. The error is infinite if the peer's output has NaN, infinity or a
    wrong shape.
    """
    out = peer.attention(call)
    if out.shape != (*call.q[0].shape[:3], call.v.shape[-1]) or not bool(out.isfinite().all()):
        return float("inf")
    length, keys = call.query_count, call.v.shape[2]
    rows = min(_CHECKED_QUERIES, length)
    past = keys - length
    wrong = norm = 0.0
    for first, seen in {(0, past + rows), (length - rows, keys)}:
        part = slice(first, first + rows)
        wanted = _naive(call, part, seen, peer.logits).double()
        wrong += float((out[:, :, part].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return float((wrong / norm) ** 0.5)


def _naive(call: AttentionCall, rows: slice, keys: int, logits: Scheme) -> Tensor:
    """Compute `naive` in float32 for some queries over the first `keys` keys, the last of which is the last query's."""
    lam = call.lam if call.lam is None or call.lam.dim() < 4 else call.lam[:, :, rows]
    k = [x[:, :, :keys].float() for x in call.k]
    return naive(
        replace(
            call,
            q=[x[:, :, rows].float() for x in call.q],
            k=[k[0], k[0]] if call.shares_keys else k,
            v=call.v[:, :, :keys].float(),
            lam=lam,
            logits=logits,
        )
    )


def format_error(error: Exception) -> str:
    """Format an error as its type and the beginning of its first line."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first if len(first) < 160 else first[:157] + '...'}"
