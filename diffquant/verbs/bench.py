"""The verb `bench`: speed and memory compared with other implementations."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, split_texts
from diffquant.verbs.notes import choose_device, say_files_written

if TYPE_CHECKING:
    from diffquant.benchmarks.cells import BenchResult

Sections = Annotated[str | Sequence[str], kinds.Kind(str, "SECTIONS", is_positional=True, is_repeatable=True)]
Peers = Annotated[str | Sequence[str], kinds.Kind(str, "NAME", is_repeatable=True)]
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
    progress: Progress | None = None,
) -> "BenchResult":
    """Compare speed and memory with other implementations.

        diffquant bench attention decode --shapes 830M --lengths 512,1K

    Each implementation's result is checked before it is timed. To resume an interrupted bench, run the same command
    again.

    Args:
        sections: sections to measure: attention, decode, linear; all by default.
        output: folder for tables, plots and report.
        device: see `search`.
        shapes: model sizes: 830M, 1.4B, 2.8B, 3B, 6.8B, 13.1B, smollm2-135m-diff-v2, diffllama-1b; the default depends
            on the section.
        lengths: lengths in tokens, such as 512,1K; a range such as 1K-16K doubles at each step.
        batches: batch sizes, such as 1,8.
        dtype: dtype of tensors: float32, bfloat16 or float16; by default float32 on cpu and bfloat16 on cuda.
        peer: implementation to compare attention and decode with; all by default.
        repeats: number of times to measure each implementation.
        graph: capture each measured step in a CUDA graph and replay that.
        progress: function called with the work done; by default a line on a terminal, one per minute in a log.

    Returns:
        All measurements.

    Raises:
        DiffQuantError: an argument is wrong; raised before the first measurement.
        FailedCellsError: a section failed; the others are written and in the error's `result`.
    """
    from diffquant.benchmarks import run
    from diffquant.benchmarks.run import PARTS, BenchOptions
    from diffquant.benchmarks.workloads import parse_lengths

    options = BenchOptions(
        sections=split_texts(sections or tuple(PARTS)),
        device=choose_device(device),
        models=split_texts(shapes),
        lengths=tuple(parse_lengths(lengths)) if lengths else (),
        batches=tuple(parse_lengths(batches)),
        dtype=dtype,
        repeats=repeats,
        peers=(peer,) if isinstance(peer, str) else tuple(peer),  # names have commas
        graph=graph,
    )
    result = run.run_bench(options, PARTS, Path(output), progress or progress_for("bench"))
    say_files_written(run.write_bench_outputs(result, Path(output)))
    run.require_complete(result)
    return result
