"""Plot of KL against stored bits per weight: diffquant's four rounding rules as lines, its peers as points."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffquant.reports.plots import new_figure, series_style, set_log_y_scale, style_axis
from research.studies.results import read_json

_RULES = {
    "nearest": "nearest (absmax)",
    "mse": "mse",
    "gptq": "gptq",
    "tuned": "tuned",
}
_SIZES = ("3:g128", "3:g32", "4:g128", "4:g32", "5:g128", "6:g128")
_LEVELS = ("iq4_xs", "iq4_nl")
# How the rows of a peer begin, and which of its settings is drawn where it has several.
_PEERS = {
    "AutoRound": ("AutoRound", ""),
    "llm-compressor": ("llm-compressor GPTQ", ", mse"),
    "llama.cpp": ("llama.cpp", ", imatrix"),
    "HQQ": ("HQQ", ""),
    "bitsandbytes nf4": ("bitsandbytes nf4", ""),
    "torchao": ("torchao", ""),
}


def plot_against_size(result: Mapping[str, Any], path: Path) -> None:
    """Draw the methods of one model's contest on its second text, which none of them was given.

    Args:
        result: raw file of `research.studies.rounding`, as `read_contest` reads it.
        path: picture to write.
    """
    rows = result["results"]
    figure = new_figure(6.4, 4.4)
    axis = figure.subplots()
    for number, (rule, label) in enumerate(_RULES.items()):
        points = [rows[f"{rule} {size}"] for size in _SIZES if f"{rule} {size}" in rows]
        axis.plot(*_places(points), **series_style(number), linewidth=2, markersize=6, label=f"diffquant {label}")
    if levels := [rows[f"tuned {name}"] for name in _LEVELS if f"tuned {name}" in rows]:
        style = series_style(len(_RULES) - 1) | {"linestyle": ":"}
        axis.plot(*_places(levels), **style, linewidth=2, markersize=9, label="diffquant tuned, llama.cpp's levels")
    for number, (label, (start, end)) in enumerate(_PEERS.items(), len(_RULES)):
        drawn = (
            name for name in rows if name.startswith(start) and name.endswith(end) and not _is_own_grid(name, rows)
        )
        points = [rows[name] for name in drawn]
        seen = series_style(number) | {"linestyle": "none"}
        axis.plot(*_places(points), **seen, markersize=7, markerfacecolor="none", label=label)
    set_log_y_scale(axis)
    axis.set_xlabel("stored bits per weight, scales included")
    axis.set_ylabel("KL from the 16-bit model, nats")
    style_axis(axis, "both")
    axis.legend(frameon=False, fontsize=8, labelspacing=0.3, loc="upper right")
    figure.savefig(path, dpi=150)


def read_contest(file: Path, levels: Path) -> dict[str, Any]:
    """Return a raw file of `research.studies.rounding` with the rows of llama.cpp's levels, measured later."""
    result: dict[str, Any] = read_json(file)
    return result | {"results": read_json(levels)["results"] | result["results"]}


def _is_own_grid(name: str, rows: Mapping[str, Any]) -> bool:
    """Whether a llama.cpp type finds the grid again that the weights were unpacked from: it is nearly exact."""
    return name.startswith("llama.cpp") and rows[name]["elsewhere"]["kl"] < 0.1 * rows["tuned 4:g32"]["elsewhere"]["kl"]


def _places(rows: list[Any]) -> tuple[list[float], list[float]]:
    return [row["bits"] for row in rows], [row["elsewhere"]["kl"] for row in rows]
