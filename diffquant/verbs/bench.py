"""The verb `bench`: speed and memory beside other implementations."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, texts
from diffquant.verbs.notes import chosen_device, wrote

if TYPE_CHECKING:
    from diffquant.benchmarks.cells import BenchResult

Sections = Annotated[Sequence[str], kinds.Kind(str, "SECTIONS", by_place=True, repeats=True)]
Peers = Annotated[Sequence[str], kinds.Kind(str, "NAME", repeats=True)]
Counts = Annotated[str, kinds.Kind(str, "LIST")]


@check_arguments
def bench(
    sections: Sections = (),
    output: kinds.NewFolder = "bench-output",
    *,
    device: kinds.Name = "auto",
    shapes: kinds.Names = "",
    lengths: Counts = "",
    batches: Counts = "1",
    dtype: kinds.Name = "",
    peer: Peers = (),
    repeats: kinds.Count = 5,
    graph: bool = False,
    tune: kinds.File | None = None,
    progress: Progress | None = None,
) -> "BenchResult | str":
    """Measure speed and memory beside other implementations.

        diffquant bench attention decode --shapes 830M --lengths 512,1K

    Every path is checked before it is timed. An interrupted bench goes on when the same command is given again.

    Args:
        sections: what to measure: attention, decode, linear, throughput; all by default.
        output: folder for tables, plots and report.
        device: as `search` takes it.
        shapes: sizes: 830M, 1.4B, 2.8B, 3B, 6.8B, 13.1B, smollm2-135m-diff-v2, diffllama-1b; some by default.
        lengths: lengths in tokens, or ranges by doubling, such as 512,1K-16K.
        batches: batch sizes, such as 1,8.
        dtype: dtype of tensors: float32, bfloat16 or float16; by default float32 on cpu and bfloat16 on cuda.
        peer: peer of attention and decode; all by default.
        repeats: number of times that each path is measured.
        graph: replay CUDA graphs.
        tune: try neighbouring kernel configurations, write the best to this file, and stop.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        Every cell; or what `tune` found, in words.

    Raises:
        DiffQuantError: what can be known before the first cell is wrong.
        FailedCellsError: a section failed; the others are written, and the error's `result` has them all.
    """
    from diffquant.benchmarks import run
    from diffquant.benchmarks.run import PARTS, BenchOptions
    from diffquant.benchmarks.workloads import lengths as counts

    device = chosen_device(device)
    if tune is not None:
        from diffquant.benchmarks.tune import tune as run_tuning

        return run_tuning(Path(tune), device, progress or progress_for("tune"))
    options = BenchOptions(
        sections=tuple(sections or PARTS),
        device=device,
        models=texts(shapes),
        lengths=tuple(counts(lengths)) if lengths else (),
        batches=tuple(counts(batches)),
        dtype=dtype,
        repeats=repeats,
        peers=tuple(peer),
        graph=graph,
    )
    result = run.run_bench(options, PARTS, Path(output), progress or progress_for("bench"))
    wrote(run.write_bench_outputs(result, Path(output)))
    run.require_complete(result)
    return result
