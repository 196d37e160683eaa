"""The command that measures speed: bench."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import verb
from diffquant.cli.options import AsJson, Device, chosen_device
from diffquant.support.comma_lists import split_list
from diffquant.support.progress import progress_for

Sections = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTIONS",
        help="attention, decode, linear, throughput, generate, quantize, export, sweep; all by default.",
    ),
]


@verb("bench attention decode --shapes 830M --lengths 512,1K")
def bench(
    sections: Sections = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for tables, plots and report.")
    ] = Path("bench-output"),
    device: Device = "auto",
    shapes: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Sizes: 830M, 1.4B, 2.8B, 3B, 6.8B, 13.1B, smollm2-135m-diff-v2, diffllama-1b; some by default.",
        ),
    ] = "",
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="Lengths in tokens, or ranges by doubling, such as 512,1K-16K.")
    ] = "",
    batches: Annotated[str, typer.Option(metavar="LIST", help="Batch sizes, such as 1,8.")] = "1",
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="float32, bfloat16 or float16; float32 on cpu, bfloat16 on cuda.")
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Peer of attention and decode; all by default. May be repeated."),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Folder or .gguf file for generate and sweep. May be repeated."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Number of times that each path is measured.")
    ] = 5,
    threads: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, help="Number of torch's threads; 0 leaves it as it is.")
    ] = 0,
    workers: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of workers that share a sweep, such as 1,2; none by default.")
    ] = "",
    graph: Annotated[bool, typer.Option("--graph", help="Replay CUDA graphs.")] = False,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Earlier bench.json; what changed by more than noise is printed."),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Try neighbouring kernel configurations, write the best to this file, and stop."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory beside other implementations.

    Every path is checked before it is timed. An interrupted bench goes on when the same command is given again.
    """
    import torch

    from diffquant.bench import cells, run
    from diffquant.bench.compare import summarize_changes
    from diffquant.bench.contest.workloads import lengths as parse_counts
    from diffquant.bench.report import markdown

    device = chosen_device(device)
    if threads:
        torch.set_num_threads(threads)
    if tune is not None:
        from diffquant.bench.gpu.tune import tune as run_tuning

        typer.echo(run_tuning(tune, device, progress_for("tune")))
        return
    former = cells.read_result(compare) if compare else None
    options = run.BenchOptions(
        sections=tuple(sections or run.SECTIONS),
        device=device,
        models=split_list(shapes),
        lengths=tuple(parse_counts(lengths)) if lengths else (),
        batches=tuple(parse_counts(batches)),
        dtype=dtype,
        repeats=repeats,
        peers=tuple(peer or ()),
        checkpoints=tuple(checkpoint or run.demo_checkpoints()),
        graph=graph,
        workers=tuple(parse_counts(workers)) if workers else (),
    )
    result = run.run_bench(options, output, progress_for("bench"))
    written = run.write_bench_outputs(result, output)
    typer.echo(json.dumps(result.to_dict(), indent=1) if as_json else markdown(result))
    if former:
        typer.echo(summarize_changes(former, result), err=as_json)
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)
    run.require_complete(result)
