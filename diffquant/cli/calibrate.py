"""The commands that read a text with a model: outliers, attention-map, search, calibrate."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffquant.cli.app import verb
from diffquant.cli.options import (
    AsJson,
    Device,
    DeviceMap,
    EvalDtype,
    Lengths,
    Logits,
    Model,
    Models,
    OffloadFolder,
    RecipeFile,
    RecipeOptions,
    Revision,
    at_revision,
    chosen_device,
    lengths_of,
    widths,
)
from diffquant.support.comma_lists import split_list
from diffquant.support.progress import progress_for

Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="UTF-8 text to read; by default the prose that ships."),
]
Tokens = Annotated[int, typer.Option(metavar="NUMBER", min=2, help="Largest number of tokens to read from the text.")]
Window = Annotated[int, typer.Option(metavar="NUMBER", help="Number of tokens that the model sees at once.")]


@verb("outliers transformer diff -o outliers")
def outliers(
    models: Models,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for outliers.json and its plot."),
    ] = None,
    text: Text = None,
    tokens: Tokens = 400_000,
    window: Window = 1024,
    dtype: EvalDtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_folder: OffloadFolder = None,
    as_json: AsJson = False,
) -> None:
    """Find the largest attention logits and hidden states.

    The table has each layer's largest magnitudes beside its median.
    """
    from diffquant.calib.analysis.outlier_outputs import FILES, outlier_table, write_outliers
    from diffquant.calib.analysis.outliers import OutlierOptions, find_outliers
    from diffquant.source.places import Places

    if output is not None:
        FILES.check(output)
    places = Places.of(device, device_map, offload_folder)
    options = OutlierOptions(text, tokens, window, dtype, chosen_device(device), places)
    outliers_by_model = find_outliers(models, options, progress_for("outliers"))
    typer.echo(outliers_by_model.to_json().rstrip() if as_json else outlier_table(outliers_by_model))
    if output is not None:
        typer.echo(f"wrote {', '.join(map(str, write_outliers(outliers_by_model, output)))}", err=as_json)


@verb("attention-map transformer diff -o attention", name="attention-map")
def attention_map(
    models: Models,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for attention-map.json and its plot."),
    ] = None,
    needles: Annotated[
        int, typer.Option(metavar="NUMBER", help="How many numbers a context hides; one is asked for.")
    ] = 1,
    lengths: Lengths = "256",
    samples: Annotated[int, typer.Option(metavar="NUMBER", help="Number of contexts per depth and length.")] = 50,
    text: Text = None,
    logits: Logits = "16",
    recipe: RecipeFile = None,
    dtype: EvalDtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how much attention goes to an answer and to noise.

    The answer is a number hidden in a context, at several depths.
    """
    from diffquant.calib.analysis.attention_map import AttentionMapOptions, map_attention
    from diffquant.calib.analysis.attention_map_outputs import FILES, attention_table, write_attention_maps
    from diffquant.evals.protocols.needle import NeedlePlan

    if output is not None:
        FILES.check(output)
    wanted = RecipeOptions("16", "16", None, None, logits, 0, None, recipe).given()
    plan = NeedlePlan(needles, 1, lengths_of(lengths), samples)
    options = AttentionMapOptions(plan, text, wanted, dtype, chosen_device(device))
    attention = map_attention(models, options, progress_for("attention"))
    typer.echo(attention.to_json().rstrip() if as_json else attention_table(attention))
    if output is not None:
        typer.echo(f"wrote {', '.join(map(str, write_attention_maps(attention, output)))}", err=as_json)


@verb("search model -o search --budget 4.5")
def search(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the recipe, measurements and plot.")
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Average stored bits of each target, scales included, such as 4.5; or size of the weights, such "
            "as 90MB.",
        ),
    ],
    target: Annotated[
        str, typer.Option(metavar="LIST", help="What to quantize, together: weights, k, v, logits.")
    ] = "weights",
    bits: Annotated[str, typer.Option(metavar="LIST", help="Widths to choose among.")] = "8,6,4",
    granularity: Annotated[
        str, typer.Option(metavar="NAME", help="What shares one scale of a weight: g32, g128 or row.")
    ] = "g32",
    text: Text = None,
    windows: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Number of windows of the text's first half to measure on.")
    ] = 8,
    window: Window = 256,
    characters: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Number of characters of the text's second half to compare on.")
    ] = 16384,
    dtype: EvalDtype = "float32",
    device: Device = "auto",
    revision: Revision = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it would take and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the widths that cost least under a budget.

    They are written as a recipe, which quantize, generate, eval and sweep take.
    """
    from diffquant.calib.search.allocation import Budget
    from diffquant.calib.search.outputs import check_search_output, write_search
    from diffquant.calib.search.search import Search, SearchOptions
    from diffquant.calib.search.table import search_table

    options = SearchOptions(
        split_list(target),
        widths(bits),
        granularity,
        text,
        windows,
        window,
        characters,
        dtype,
        chosen_device(device),
    )
    wanted = Budget.parse(budget)
    if not dry_run:
        check_search_output(str(wanted), output)
    run = Search(at_revision(model, revision), wanted, options, output)
    if dry_run:
        typer.echo(run.estimate())
        return
    result = run.run(progress_for("search"))
    written = write_search(result, output)
    typer.echo(result.to_json().rstrip() if as_json else search_table(result))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)


@verb("calibrate model -o scales.safetensors")
def calibrate(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write, such as scales.safetensors.")
    ],
    observer: Annotated[
        str, typer.Option(metavar="NAME", help="Observer, which finds a range: absmax, percentile or mse.")
    ] = "absmax",
    percentile: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="Percentage of magnitudes that the percentile observer does not clip."),
    ] = 99.99,
    bits: Annotated[
        int, typer.Option(metavar="NUMBER", help="Width that the mse observer clips for, and that the report is about.")
    ] = 8,
    target: Annotated[str, typer.Option(metavar="LIST", help="What to find ranges of: k, v, logits.")] = "k,v,logits",
    text: Text = None,
    tokens: Tokens = 16384,
    window: Window = 512,
    dtype: EvalDtype = "float32",
    device: Device = "auto",
    device_map: DeviceMap = None,
    offload_folder: OffloadFolder = None,
    revision: Revision = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find static ranges of keys, values and logits on a text.

    Ranges come from one half of the text, and the report is about the other half.
    """
    from dataclasses import asdict

    from diffquant.calib.calibration.calibrate import CalibrationOptions
    from diffquant.calib.calibration.calibrate import calibrate as run
    from diffquant.calib.calibration.fit import fit_table
    from diffquant.calib.calibration.observers import Observer
    from diffquant.source.places import Places
    from diffquant.source.ranges import check_ranges_output, write_ranges
    from diffquant.support.code import provenance

    check_ranges_output(output, overwrite)
    rule = Observer(observer, percentile, bits)
    places = Places.of(device, device_map, offload_folder)
    options = CalibrationOptions(split_list(target), rule, text, tokens, window, dtype, chosen_device(device), places)
    ranges, fits = run(at_revision(model, revision), options, progress_for("calibrate"))
    write_ranges(output, ranges)
    made = {"settings": {**ranges.settings, **provenance(run.__module__)}, "fits": [asdict(fit) for fit in fits]}
    typer.echo(json.dumps(made) if as_json else fit_table(fits, bits))
    typer.echo(f"wrote {output}", err=as_json)
