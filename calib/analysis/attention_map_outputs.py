"""Attention by part of the prompt for people: a table like the paper's Table 3, stacked bars, numbers as JSON."""

from pathlib import Path
from typing import Any

from diffquant.calib.analysis.attention_map import SHARE, SIGNED, AttentionMaps, ModelAttention, Place
from diffquant.calib.analysis.needle_parts import PARTS
from diffquant.report.plots import COLOURS, literal, new_figure, tidy
from diffquant.report.tables import aligned
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles

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
    return "\n".join([*aligned(head, lines), "", note])


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
            axis.set_title(literal(title), fontsize=10)
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
    tidy(axis)


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
