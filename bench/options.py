"""Options of a run of the bench: what is measured, and where."""

from dataclasses import dataclass
from pathlib import Path

from diffquant.bench.contest import contest
from diffquant.bench.contest.contest import Contest
from diffquant.bench.contest.workloads import Workload, model_named
from diffquant.errors import UsageError
from diffquant.support.devices import resolve_device
from diffquant.support.spelling import spelled

SECTIONS = ("attention", "decode", "linear", "throughput", "generate", "serve", "quantize", "export", "sweep")
_DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
DEFAULT_LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192, 16384)}
DEFAULT_MODELS = {"cpu": ("830M", "smollm2-135m-diff-v2"), "cuda": ("3B", "smollm2-135m-diff-v2")}


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run of the bench: what is measured, and where.

    Attributes:
        sections: names in `SECTIONS`; all by default.
        device: "cpu" or "cuda"; "auto" becomes one of them.
        models: names in the registry of shapes; some by default.
        lengths, batches: sizes of attention's calls; decode's contexts are four times as long.
        dtype: name of the torch dtype; the device's own by default.
        repeats: turns of each path.
        peers: names of attention's and decode's peers; all by default.
        checkpoints: folders or .gguf files for the sections that run whole programs.
        graph: whether CUDA graphs are replayed.
        workers: numbers of workers that share a sweep on the first checkpoint, each beside the first; none by default.
    """

    sections: tuple[str, ...] = SECTIONS
    device: str = "auto"
    models: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    dtype: str = ""
    repeats: int = 5
    peers: tuple[str, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    graph: bool = False
    workers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.sections if name not in SECTIONS]
        if unknown:
            raise UsageError(f"unknown section {', '.join(map(repr, unknown))}; known are {', '.join(SECTIONS)}")
        object.__setattr__(self, "device", resolve_device(self.device))
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"the bench runs on cpu or cuda, not on {self.device!r}")
        if self.graph and self.device != "cuda":
            raise UsageError(f"{spelled('graph')}: only CUDA devices have graphs")
        if self.repeats < 1 or min(self.batches, default=0) < 1 or min(self.workers, default=1) < 1:
            raise UsageError(
                f"{spelled('repeats')}, {spelled('batches')} and {spelled('workers')} take counts of at least 1"
            )
        missing = [str(path) for path in self.checkpoints if not path.exists()]
        if missing:
            raise UsageError(f"no such checkpoint: {', '.join(missing)}")
        self.workloads(1)
        for section in contest.SECTIONS.keys() & set(self.sections):
            Contest(section, self.device, self.repeats, self.peers_of(section))

    @property
    def chosen_dtype(self) -> str:
        """Name of the dtype that is measured."""
        return self.dtype or _DEFAULT_DTYPES[self.device]

    def workloads(self, factor: int) -> list[Workload]:
        """Prompts where `factor` is 1; else single tokens at the end of contexts `factor` times as long."""
        made = [
            Workload(model_named(name), length if factor == 1 else 1, factor * length, batch, self.chosen_dtype)
            for name in self.models or DEFAULT_MODELS[self.device]
            for batch in self.batches
            for length in self.lengths or DEFAULT_LENGTHS[self.device]
        ]
        made[0].torch_dtype  # noqa: B018  # refuses an unknown dtype
        return made

    def peers_of(self, section: str) -> tuple[str, ...]:
        """Named peers that a section runs: those it knows where several sections run, all where it runs alone."""
        if len(contest.SECTIONS.keys() & set(self.sections)) == 1:
            return self.peers
        known = {name for peers in contest.SECTIONS.values() for name in peers}
        return tuple(name for name in self.peers if name in contest.SECTIONS[section] or name not in known)
