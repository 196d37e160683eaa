"""Outputs of a search: recipe and results as files, a table for the terminal, plots and an HTML report."""

import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from diffquant.calib.search.result import (
    Candidate,
    Measurement,
    SearchResult,
    Width,
    format_width,
    group_searches,
    interpolate_uniform_kl,
    kinds_table,
    read_search,
    read_searches,
)
from diffquant.checkpoints.source import Source
from diffquant.errors import OutputExistsError
from diffquant.reports.page import Charts, Report, Section, format_settings, write_run
from diffquant.reports.plots import (
    Tips,
    add_tooltip,
    as_svg,
    draw_panel,
    escape_dollars,
    new_figure,
    series_style,
    set_log_y_scale,
    style_axis,
)
from diffquant.reports.tables import Table, format_size
from diffquant.support.outputs import RunFiles, check_replaceable, has_fields


def search_table(result: SearchResult) -> str:
    """Return a text table of the compared recipes, and a sentence that compares them at equal size.

    If parts of layers were measured, a table with the KL per saved bit of each kind of tensor comes before the
    sentence.
    """
    parts = [] if result.parts is None else [*kinds_table(result).text_lines(), ""]
    return "\n".join([*candidates_table(result).text_lines(), "", *parts, compare_with_uniform(result)])


def candidates_table(result: SearchResult) -> Table:
    """Return a table of the compared recipes on held-out text; the first row, the 16-bit model, is shaded."""
    lines = [["16 bits", "16", "", f"{result.perplexity:.3f}", "", ""], *map(_cells, result.candidates)]
    heads = ("recipe", "stored bits", "checkpoint", "perplexity", "KL", "predicted KL")
    return Table(heads, lines, [name == "16 bits" for name, *_ in lines], names=2)


def compare_with_uniform(result: SearchResult) -> str:
    """Return a sentence that compares the searched recipe's KL with those of two other recipes of the same size.

    They are uniform widths, if their KL can be interpolated at that size, and widths that are spread evenly.
    """
    searched = result.candidates[0]
    uniform = interpolate_uniform_kl(result)
    rival = "" if uniform is None else f"{uniform:.4g} of uniform widths that store as much (interpolated), "
    even = next(c for c in result.candidates if c.name == "spread evenly")
    return (
        f"budget {result.budget}: KL {searched.kl:.4g} on held-out text, against {rival}{even.kl:.4g} of the same "
        "widths spread evenly"
    )


def _cells(candidate: Candidate) -> list[str]:
    bits = ", ".join(
        f"{mean:.2f}" if len(candidate.bits) == 1 else f"{t} {mean:.2f}" for t, mean in candidate.bits.items()
    )
    predicted = "-" if candidate.predicted is None else f"{candidate.predicted:.4g}"
    size, perplexity = format_size(candidate.nbytes), f"{candidate.perplexity:.3f}"
    return [candidate.name, bits, size, perplexity, f"{candidate.kl:.4g}", predicted]


def search_report(folder: Path) -> Report:
    """Return the HTML report of all searches in a folder, read from its search-*.json files."""
    results = read_searches(folder)
    patterns = ("recipe-*.yaml", "search-*.json", "search-*.json.xz")
    files = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    charts = [
        draw_panel((6.0, 4.0), partial(draw_pareto, group), f"{group[0].model}: KL by size")
        for group in group_searches(results)
    ]
    sections = [Section("KL by size", [Charts(charts)]), *map(_section, results)]
    dates = [result.settings["date"] for result in results if "date" in result.settings]
    headline = [f"{result.model}, {compare_with_uniform(result)}." for result in results]
    return Report("search", folder.absolute().name, headline, max(dates, default=""), sections, files)


def _section(result: SearchResult) -> Section:
    widths = result.widths
    costliest = sorted(result.measurements, key=lambda unit: -unit.kl[widths[-1]])
    units = [
        [unit.name, unit.target, f"{unit.elements:,}", *(f"{unit.kl[bits]:.3g}" for bits in widths), str(unit.chosen)]
        for unit in costliest
    ]
    heads = ["unit", "target", "elements", *(f"KL at {format_width(width)}" for width in widths), "bits given"]
    return Section(
        f"Budget {result.budget}",
        [
            candidates_table(result),
            "KL is from the 16-bit model's next-token distributions, in nats, on held-out text.",
            Charts([("", as_svg(heat_figure(result), f"{result.model}, {result.budget}: bits given to each tensor"))]),
            kinds_table(result),
            "KL of a kind: the sum over its units, each rounded separately. Mbit: a million bits saved.",
            Section(f"{len(units)} units, the costliest first", [Table(heads, units, names=2)], folded=True),
            Section("Settings", [format_settings(result.settings)], folded=True),
        ],
    )


def write_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write a search's recipe-*.yaml, search-*.json and search-*.png, named after the budget.

    Also write pareto.png and search.html, which show all searches of the folder.

    Raises:
        OutputExistsError: the folder has files with these names that no search wrote.
    """
    check_search_output(result.budget, folder)
    recipe, data, picture = _names(result.budget)
    pareto, report = _SHARED
    # The numbers come first: they show that the other files are a search's, also after a kill.
    texts = {data: result.to_json(), recipe: result.recipe.to_yaml()}
    pictures = {
        picture: lambda path: heat_figure(result).savefig(path, dpi=160),
        pareto: lambda path: plot_pareto(read_searches(folder), path),
    }
    numbers, chosen, *others = write_run(folder, texts, pictures, report, lambda *_: search_report(folder))
    return [chosen, numbers, *others]


def check_search_output(budget: str, folder: Path) -> None:
    """Check early that a search's files can be written, and would replace only files of earlier searches.

    Raises:
        OutputExistsError: the folder has files with these names that no search wrote.
        UsageError: the folder cannot be written to.
    """
    recipe, data, picture = _names(budget)
    RunFiles(data, _FIELDS, (recipe, picture)).check(folder)
    shared = [name for name in _SHARED if os.path.lexists(folder / name)]
    is_of_searches = any(has_fields(file, _FIELDS) for file in folder.glob("search-*.json"))
    check_replaceable(folder, shared, shared if is_of_searches else ())


def check_same_search(budget: str, source: Source, targets: Collection[str], folder: Path) -> None:
    """Check early that a search would not replace the recipe of a search with another model or other targets.

    Raises:
        OutputExistsError: the folder has a search with the same budget, but another model or other targets.
    """
    file = folder / _names(budget)[1]
    if not file.exists():
        return
    earlier = read_search(file)
    is_another = earlier.fingerprint != source.fingerprint
    if is_another or {*earlier.candidates[0].bits} != {*targets}:
        found = ", ".join(earlier.candidates[0].bits)
        namesake = "another " if is_another and earlier.model == source.path.name else ""
        raise OutputExistsError(
            f"{file} is a search of {earlier.model} ({found}); a search of {namesake}{source.path.name} "
            f"({', '.join(targets)}) would replace it; choose another output"
        )


def _names(budget: str) -> list[str]:
    stem = budget.replace(" ", "-")
    return [f"recipe-{stem}.yaml", f"search-{stem}.json", f"search-{stem}.png"]


_FIELDS = frozenset({"budget", "candidates", "measurements", "settings"})
_SHARED = ("pareto.png", "search.html")


# Colours of text on light and on dark cells, whatever the page's theme.
_DARK, _LIGHT = "#111111", "#f5f5f5"


def heat_figure(result: SearchResult) -> Any:
    """Return a figure with a heat map of each unit's KL at the narrowest width; cells show the unit's chosen bits.

    The axes are the layer and the unit's kind, such as "mlp.up_proj".
    """
    from matplotlib.colors import LogNorm

    kinds = list(dict.fromkeys(m.kind for m in result.measurements))
    layers = 1 + max(m.layer for m in result.measurements)
    narrowest = result.widths[-1]
    at = {(m.kind, m.layer): m for m in result.measurements}
    values = [[_drawn_kl(at.get((kind, layer)), narrowest) for layer in range(layers)] for kind in kinds]
    drawn = [value for row in values for value in row if value == value]
    figure = new_figure(max(6.0, 2.6 + 0.33 * layers), 1.9 + 0.36 * len(kinds))
    axis = figure.subplots()
    norm = LogNorm(min(drawn), max(*drawn, min(drawn) * 1.01))
    image = axis.imshow(values, cmap="cividis", norm=norm, aspect="auto")
    for (kind, layer), measurement in at.items():
        shade = norm(_drawn_kl(measurement, narrowest))
        axis.text(
            layer,
            kinds.index(kind),
            str(measurement.chosen),
            ha="center",
            va="center",
            fontsize=8 if len(str(measurement.chosen)) < 3 else 5,
            fontweight="bold" if measurement.chosen != narrowest else "normal",
            color=_DARK if shade > 0.5 else _LIGHT,
        )
    axis.set_yticks(range(len(kinds)), [kind.removeprefix("self_attn.").removeprefix("mlp.") for kind in kinds])
    axis.set_xticks(range(layers), [str(n) if n % 5 == 0 or layers <= 12 else "" for n in range(layers)])
    axis.set_xlabel("layer")
    axis.set_title(escape_dollars(f"{result.model}, {result.budget}: bits given to each tensor"), fontsize=11)
    figure.colorbar(image, ax=axis, pad=0.01, label=f"KL at {format_width(narrowest)} alone, nats")
    return figure


def _drawn_kl(measurement: Measurement | None, width: Width) -> Any:
    return float("nan") if measurement is None else max(measurement.kl[width], 1e-9)


def plot_pareto(results: Sequence[SearchResult], path: Path) -> None:
    """Save a plot of searches' candidates by size and KL, with a panel for each model and set of targets."""
    groups = group_searches(results)
    figure = new_figure(6.4 * len(groups), 4.2)
    for axis, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        draw_pareto(group, axis)
    figure.savefig(path, dpi=160)


def draw_pareto(results: Sequence[SearchResult], axis: Any, tips: Tips | None = None) -> None:
    """Plot searches of one model: uniform widths as a line, searched widths as points.

    For comparison, other points show two neighbouring widths, which take turns over the modules.
    The horizontal axis is the checkpoint's size in MB, or the targets' mean stored bits if weights are not searched.
    """
    is_stored = "weights" in results[0].candidates[0].bits
    unit = "MB" if is_stored else "bits"
    families: dict[str, dict[str, Candidate]] = {"uniform": {}, "spread evenly": {}, "searched": {}}
    for result in results:
        for candidate in result.candidates:
            is_uniform = candidate.name.startswith("uniform")
            name = candidate.name if is_uniform else f"{candidate.name}, {result.budget}"
            families["uniform" if is_uniform else candidate.name][name] = candidate
    for number, (family, candidates) in enumerate(families.items()):
        points = sorted((_size(each, is_stored), each.kl, name) for name, each in candidates.items())
        style = series_style(number)
        style["linestyle"] = "-" if family == "uniform" else "none"
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], markersize=7, label=family, **style)
        for x, y, name in points:
            add_tooltip(axis, tips, x, y, f"{name}: {x:.4g} {unit}, KL {y:.3g}")
            axis.annotate(escape_dollars(name), (x, y), (7, 4), textcoords="offset points", fontsize=7.5)
    kls = [candidate.kl for candidates in families.values() for candidate in candidates.values()]
    # A KL is 0 if weights need no rounding at a width; it has no logarithm.
    if min(kls) > 0:
        axis.set_ylim(0.6 * min(kls), 1.8 * max(kls))
        set_log_y_scale(axis)
    axis.margins(x=0.18)
    axis.set_xlabel(
        "checkpoint, MB" if is_stored else f"stored bits, mean over {', '.join(results[0].candidates[0].bits)}"
    )
    axis.set_ylabel("KL on held-out text, nats")
    axis.set_title(escape_dollars(results[0].model), fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    style_axis(axis, "both")


def _size(candidate: Candidate, is_stored: bool) -> float:
    return candidate.nbytes / 1e6 if is_stored else sum(candidate.bits.values()) / len(candidate.bits)
