"""Estimates of the ratios a GPU must show, from machine code: `python -m diffquant.bench.gpu --estimate`.

Every kernel is compiled for Hopper through its own launch code and costed by `diffquant.bench.gpu.hopper`, for an H100
and for an H200; what the rivals take comes from published speeds. It judges a change before that costs time on a GPU
and replaces no measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from diffquant.bench.gpu.binaries import Binary
from diffquant.bench.gpu.compiling import Launch, compile_launches
from diffquant.bench.gpu.groups import Aim
from diffquant.bench.gpu.hopper import Card, blocks_at_once, seconds, step
from diffquant.kernels.gpu import AbsentGpu

# Operations a second on an H100 of attention in fp16, causal, 16K tokens, d 128 (arXiv 2407.08608, figure 5).
CUDNN, FLASH_2 = 539e12, 335e12
_PAIRS, _WIDTH = 12, 128  # the 3B model of arXiv 2410.05258


@dataclass(frozen=True)
class Work:
    """The work of a launch in the workload that is estimated, whatever it was compiled on.

    Attributes:
        steps: steps of its blocks' inner loops.
        nbytes: bytes it moves.
        programs: number of its blocks where they are alike, else 0.
    """

    steps: float = 0.0
    nbytes: float = 0.0
    programs: int = 0


@dataclass(frozen=True)
class Path:
    """A way to compute a workload.

    Attributes:
        call: call that launches its kernels, on as few tokens as compile the same ones.
        work: function from a launch to what it has to do in the workload.
    """

    name: str
    call: Callable[[], object]
    work: Callable[[Launch], Work]


# Each launch of a path with the seconds that it is expected to take.
Estimate = list[tuple[Binary, float]]


def compiled(path: Path, absent: AbsentGpu) -> list[tuple[Binary, Work]]:
    """A path's launches, compiled and cut for a GPU that is not there, and what each has to do."""
    return [(launch.binary, path.work(launch)) for launch in compile_launches(path.call, absent)]


def estimate(launches: Sequence[tuple[Binary, Work]], card: Card) -> Estimate:
    """Estimate of a path's launches on a card."""
    return [(each, seconds(each, card, work.steps, work.nbytes, work.programs)) for each, work in launches]


def attention_seconds(tokens: int, units: int, operations_a_second: float) -> float:
    """Time of causal attention of the 3B model, in units of h·N²·d multiply-adds, at a published speed."""
    return units * 2 * _PAIRS * _WIDTH * tokens * tokens / 2 / operations_a_second


def tile_steps(tokens: int, queries: int, keys: int) -> int:
    """Steps of `keys` that causal tiles of `queries` rows take over as many keys as there are tokens."""
    return sum(ceil(min(top + queries, tokens) / keys) for top in range(0, tokens, queries))


def report(
    card: Card, estimates: Mapping[str, Estimate], rivals: dict[str, float], aims: Sequence[tuple[str, Aim]]
) -> str:
    """Text of estimates by path: each aim beside its ratio, then every kernel's resources and where its cycles go."""
    taken = rivals | {path: sum(part for _, part in parts) for path, parts in estimates.items()}
    lines = [f"{card.name}:"]
    for name, aim in aims:
        ratio = taken[aim.other] / taken[aim.path]
        state = "reached" if ratio >= aim.at_least else "missed"
        lines.append(f"{name}  {ratio:5.2f}x  aim {aim.at_least:.2f}x {state:8} {aim.path}  against  {aim.other}")
    lines.append("")
    for path, parts in estimates.items():
        lines.append(f"{path}: {taken[path] * 1e3:.4g} ms")
        lines += [f"  {_part_text(binary, part)}" for binary, part in parts]
    lines += [f"{name}: {taken[name] * 1e3:.4g} ms, from published speed" for name in rivals]
    return "\n".join(lines)


def _part_text(binary: Binary, part: float) -> str:
    said = [
        f"{binary.kernel}: {part * 1e3:.4g} ms",
        f"{binary.registers} registers",
        f"{binary.stack} B of stack" + (", in a main loop" if binary.spills_in_a_main_loop() else ""),
        f"{binary.shared:,} B shared",
        f"{binary.warps} warps",
        f"{blocks_at_once(binary)} blocks at once",
    ]
    each = step(binary)
    if each is not None:
        said.append(
            f"a step: {each.products:.0f} cycles of products, {each.instructions:.0f} of instructions, "
            f"{each.special:.0f} of special functions, {each.barriers} barriers of the block, "
            f"{each.cycles:.0f} expected"
        )
    return "; ".join(said)
