"""Contest of peers on the same shapes: each is checked against `naive`, then timed in turns with the others."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

import torch

from diffquant.bench.cells import BenchCell
from diffquant.bench.contest.decode import DECODE_PEERS
from diffquant.bench.contest.peers import BASELINE, PEERS, Peer, failure, relative_error, tolerance
from diffquant.bench.contest.workloads import Workload
from diffquant.bench.memory import cpu_peak, cuda_peak, give_blocks_pages
from diffquant.bench.timing import interleaved, prepare
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.support.progress import Progress, silent

# Imports that peers do when they are first called, and that take seconds.
_PRELOADED = ("diffquant.model.cache", "transformers.models.diffllama.modeling_diffllama")
# Each section's peers by name.
SECTIONS: Mapping[str, Mapping[str, Peer]] = {"attention": PEERS, "decode": DECODE_PEERS}


@dataclass(frozen=True)
class Contest:
    """The peers of a section, checked and timed in turns on one device.

    Attributes:
        section: name in `SECTIONS`.
        device: "cpu" or "cuda".
        repeats: turns of each peer.
        peers: names of those that run; all of the section by default. The baseline is always among them.
        graph: whether CUDA graphs are replayed.
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
            raise UsageError(f"unknown peer {', '.join(map(repr, unknown))}; {self.section} knows {', '.join(known)}")

    def entrants(self) -> dict[str, Peer]:
        """Peers that run, by name."""
        known = SECTIONS[self.section]
        return {name: peer for name, peer in known.items() if not self.peers or name in {BASELINE, *self.peers}}

    def run(self, workloads: Sequence[Workload], progress: Progress = silent) -> list[BenchCell]:
        """Cells of every peer on every workload.

        A peer that cannot run a workload is there with the reason; one that disagrees with `naive` is not timed.
        """
        cells: list[BenchCell] = []
        for done, work in enumerate(workloads):
            progress(done, len(workloads), f"{self.section}: {work.name}")
            cells += self._times(work)
        return self._with_memory(cells, workloads)

    @torch.inference_mode()
    def _times(self, work: Workload) -> list[BenchCell]:
        cells: dict[str, BenchCell] = {}
        calls: dict[str, Callable[[], float]] = {}
        for name, peer in self.entrants().items():
            try:
                call = peer.make(work, self.device)
                cells[name] = self._admitted(work, name, peer, call)
                if cells[name].missing is None:
                    calls[name] = prepare(_bound(peer, call), self.device, graph=self.graph)
            except Exception as error:  # whatever a peer fails with, the table says it
                cells[name] = replace(self._cell(work, name, peer), missing=failure(error))
        times = interleaved(calls, self.repeats)
        return [replace(cell, values=tuple(times.get(name, ()))) for name, cell in cells.items()]

    def _admitted(self, work: Workload, name: str, peer: Peer, call: AttentionCall) -> BenchCell:
        """Cell of a peer with its error; `missing` says why it must not be timed."""
        allowed = tolerance(peer, work.torch_dtype)
        cell = replace(self._cell(work, name, peer), facts=peer.facts(call))
        reason = peer.missing(call)
        if reason:
            return replace(cell, missing=reason)
        error = relative_error(peer, call)
        if not error <= allowed:
            return replace(
                cell, error=error, missing=f"wrong: {error:.1e} from naive, {allowed:.0e} allowed; not timed"
            )
        return replace(cell, error=error)

    def _cell(self, work: Workload, name: str, peer: Peer) -> BenchCell:
        count = peer.count(work)
        return BenchCell(
            self.section,
            work.name,
            name,
            baseline=BASELINE,
            operations=count.operations,
            bytes=count.bytes,
            touched=count.bytes,
            length=work.keys,
            tolerance=tolerance(peer, work.torch_dtype),
        )

    def _with_memory(self, cells: list[BenchCell], workloads: Sequence[Workload]) -> list[BenchCell]:
        """Cells with the largest memory of each beyond its inputs; on the CPU each is called in a fresh process."""
        by_name = {work.name: work for work in workloads}
        threads = torch.get_num_threads()
        return [
            replace(cell, peak_bytes=self.peak(cell.path, by_name[cell.workload], threads)) if cell.values else cell
            for cell in cells
        ]

    def peak(self, name: str, work: Workload, threads: int) -> int:
        """Largest number of bytes that a peer's call takes beyond its inputs; on the CPU with this many threads."""
        if self.device == "cuda":
            peer = self.entrants()[name]
            with torch.inference_mode():
                return cuda_peak(_bound(peer, peer.make(work, self.device)))
        with ProcessPoolExecutor(1, _fresh_processes()) as fresh:
            return fresh.submit(resident_peak, self.section, name, work, threads).result()


def _fresh_processes() -> BaseContext:
    """Context of processes that have imported what peers need and computed nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOADED])
    return context


@torch.inference_mode()
def resident_peak(section: str, name: str, work: Workload, threads: int) -> int:
    """Peak bytes of this process during a peer's call, beyond its inputs; for a process that does nothing else."""
    give_blocks_pages()
    torch.set_num_threads(threads)
    peer = SECTIONS[section][name]
    # Libraries and thread pools are no part of a call's memory.
    few = replace(work, queries=min(16, work.queries), keys=16)
    _bound(peer, peer.make(few, "cpu"))()
    return cpu_peak(_bound(peer, peer.make(work, "cpu")))


def _bound(peer: Peer, call: AttentionCall) -> Callable[[], Any]:
    return lambda: peer.attention(call)
