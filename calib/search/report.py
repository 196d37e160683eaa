"""The report of the searches in a folder: KL by size, and for each budget candidates, bits and the costliest units."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.calib.search.plots import draw_pareto, heat_figure
from diffquant.calib.search.result import SearchResult, alike, read_searches
from diffquant.calib.search.roles import roles_table
from diffquant.calib.search.table import HEADS, table_lines, verdict
from diffquant.calib.search.widths import spoken
from diffquant.report.page import Charts, Drawing, Fold, Report, Section, Table
from diffquant.report.plots import Tips, as_svg, new_figure


def search_report(folder: Path) -> Report:
    """The report of all searches whose search-*.json lie in a folder."""
    results = read_searches(folder)
    files = sorted(
        file.name for pattern in ("recipe-*.yaml", "search-*.json", "search-*.json.xz") for file in folder.glob(pattern)
    )
    sections = [
        Section("KL by size", [Charts([_pareto(group) for group in alike(results)])]),
        *(section for result in results for section in _sections(result)),
        Section("Settings", [_settings_facts(results)]),
    ]
    dates = [result.settings["date"] for result in results if "date" in result.settings]
    headline = [f"{result.model}, {verdict(result)}." for result in results]
    return Report("search", folder.absolute().name, headline, max(dates, default=""), sections, files)


def _pareto(group: Sequence[SearchResult]) -> Drawing:
    figure, tips = new_figure(6.0, 4.0), Tips()
    draw_pareto(figure.subplots(), group, tips)
    return Drawing(as_svg(figure, f"{group[0].model}: KL by size", tips))


def _sections(result: SearchResult) -> list[Section]:
    widths = result.widths
    costliest = sorted(result.measurements, key=lambda unit: -unit.kl[widths[-1]])
    units = [
        [unit.name, unit.target, f"{unit.elements:,}", *(f"{unit.kl[bits]:.3g}" for bits in widths), str(unit.chosen)]
        for unit in costliest
    ]
    heads = ["unit", "target", "elements", *(f"KL at {spoken(width)}" for width in widths), "bits given"]
    kinds, roles = roles_table(result)
    heat = as_svg(heat_figure(result), f"{result.model}, {result.budget}: bits given to each tensor")
    return [
        Section(
            f"Budget {result.budget}",
            [
                Table(HEADS, table_lines(result), [name == "16 bits" for name, *_ in table_lines(result)], names=2),
                "KL is that of the next-token distributions from those of 16 bits, in nats, on text held out.",
                Drawing(heat),
                Table(kinds, roles),
                "KL of a kind: its units' costs added up, each rounded alone. Mbit: a million bits saved of 16.",
                Fold(f"{len(units)} units, the costliest first", [Table(heads, units, names=2)]),
            ],
        )
    ]


def _settings_facts(results: Sequence[SearchResult]) -> dict[str, str]:
    """Settings by name; where searches differ in one, each value with the budgets that had it."""
    found: dict[str, dict[str, list[str]]] = {}
    for result in results:
        for name, value in result.settings.items():
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in entries:
                if entry is not None:
                    budgets = found.setdefault(f"{name} {key}".strip(), {})
                    budgets.setdefault(str(entry), []).append(result.budget)
    return {
        name: "; ".join(
            value if len(budgets) == len(results) else f"{value} (budget {', '.join(budgets)})"
            for value, budgets in values.items()
        )
        for name, values in found.items()
    }
