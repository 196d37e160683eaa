"""Attention by part of the prompt: a table like the paper's Table 3, stacked bars, numbers as JSON.

python -m research.studies.attention_map TRANSFORMER DIFF --output attention
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.measure.protocols.needle import NeedlePlan
from diffquant.recipe import Recipe
from diffquant.reports.plots import COLOURS, escape_dollars, new_figure, style_axis
from diffquant.reports.tables import align_columns
from diffquant.support.files import write_atomically
from diffquant.support.names import split_numbers
from diffquant.support.outputs import RunFiles
from diffquant.support.progress import progress_for
from diffquant.verbs.recipes import recipe_from_options
from research.studies.attention_by_part import SHARE, SIGNED, AttentionMaps, ModelAttention, Place, map_attention
from research.studies.needle_parts import PARTS

_TITLES = {
    "answer": "answer",
    "sentence": "rest of sentence",
    "others": "other needles",
    "prose": "prose",
    "question": "question",
    "first": "first token",
}
# From the bottom: what is sought starts at 0, noise hangs from 1, and what is neither lies between.
_STACK = {
    "answer": (COLOURS[0], ""),
    "sentence": (COLOURS[5], "//"),
    "question": ("#dddddd", ""),
    "first": ("#999999", "xx"),
    "others": (COLOURS[4], ".."),
    "prose": (COLOURS[1], ""),
}


def attention_table(attention: AttentionMaps) -> str:
    """A table with a line for each model, length and depth."""
    head = ["model", "tokens", "depth", *_TITLES.values(), "needle, signed", "prose, signed", "right"]
    lines = [
        [model.name if place is model.places[0] else "", *_cells(place)]
        for model in attention.models
        for place in model.places
    ]
    items = ", ".join(dict.fromkeys(f"{place.items:,}" for model in attention.models for place in model.places))
    note = (
        f"attention of the position that predicts the answer, over heads, layers and {items} items: shares of the "
        "weights' magnitudes, and signed weights as they are"
    )
    return "\n".join([*align_columns(head, lines), "", note])


def main(
    models: Annotated[list[Path], typer.Argument(help="Checkpoint folders or .gguf files, side by side.")],
    output: Annotated[Path | None, typer.Option(help="Folder for attention-map.json and its plot.")] = None,
    needles: Annotated[int, typer.Option(help="How many numbers a context hides; one is asked for.")] = 1,
    lengths: Annotated[str, typer.Option(help="Lengths of prompts in tokens, such as 256,1K,4K.")] = "256",
    samples: Annotated[int, typer.Option(help="Number of contexts per depth and length.")] = 50,
    text: Annotated[Path | None, typer.Option(help="File of prose that hides the numbers; the shipped one.")] = None,
    logits: Annotated[str | None, typer.Option(help="Scheme of attention logits, such as 4:row:shift.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="File of a recipe to simulate.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the models.")] = "auto",
    device: Annotated[str, typer.Option(help="Device that they run on.")] = "auto",
) -> None:
    """Measure how much attention goes to an answer and to noise when a number is retrieved from prose."""
    if output is not None:
        FILES.check(output)
    # Of a length that is named twice the items would be the same, and count as twice as many.
    plan = NeedlePlan(needles, 1, tuple(dict.fromkeys(split_numbers("lengths", lengths, "256,1K,4K"))), samples)
    given = recipe_from_options(recipe=recipe, logits=logits)
    simulated = None if given is None else Recipe.parse(given)
    found = map_attention(
        models,
        plan,
        text=text,
        recipe=simulated,
        dtype=dtype,
        device=device,
        progress=progress_for("attention"),
    )
    if output is not None:
        write_attention_maps(found, output)
    print(attention_table(found))


FILES = RunFiles("attention-map.json", frozenset({"models", "settings"}), ("attention-map.png",))


def write_attention_maps(attention: AttentionMaps, folder: Path) -> list[Path]:
    """Write attention-map.json and attention-map.png into a folder that `FILES` has checked."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "attention-map.json", folder / "attention-map.png"
    write_atomically(data, attention.to_json())
    plot_attention(attention, picture)
    return [data, picture]


def plot_attention(attention: AttentionMaps, path: Path) -> None:
    """Draw shares by depth in stacked bars, a panel for each model and length; the suffix says the format."""
    lengths = sorted({place.length for model in attention.models for place in model.places})
    rows, columns = len(lengths), len(attention.models)
    figure = new_figure(1.0 + 3.1 * columns, 0.9 + 2.9 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for row, length in enumerate(lengths):
        axes[row][0].set_ylabel("share of attention, %")
        for axis, model in zip(axes[row], attention.models, strict=True):
            _draw(axis, model, length)
            title = model.name if rows == 1 else f"{model.name}, {length:,} tokens"
            axis.set_title(escape_dollars(title), fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("depth of the answer")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, 2 * columns), frameon=False, fontsize=9)
    figure.savefig(path, dpi=200)


def _draw(axis: Any, model: ModelAttention, length: int) -> None:
    places = [place for place in model.places if place.length == length]
    depths = [f"{place.depth:.0%}" for place in places]
    bottom = [0.0] * len(places)
    for part, (colour, hatch) in _STACK.items():
        shares = [100 * place.overall[SHARE][part] for place in places]
        axis.bar(
            depths,
            shares,
            bottom=bottom,
            width=0.78,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
            label=_TITLES[part],
        )
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axis.set_ylim(0, 100)
    style_axis(axis)


def _cells(place: Place) -> list[str]:
    share, signed = place.overall[SHARE], place.overall[SIGNED]
    return [
        f"{place.length:,}",
        f"{place.depth:.0%}",
        *(f"{share[part]:.1%}" for part in PARTS),
        f"{signed['answer'] + signed['sentence']:+.3f}",
        f"{signed['prose']:+.3f}",
        f"{place.right:.0%}",
    ]


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
