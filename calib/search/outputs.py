"""The files that a search leaves: recipe, numbers, plots and report."""

from pathlib import Path

from diffquant.calib.search.plots import heat_map, plot_pareto
from diffquant.calib.search.report import search_report
from diffquant.calib.search.result import SearchResult, read_searches
from diffquant.report.page import page
from diffquant.support.files import write_atomically


def write_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write recipe.yaml, search.json and search.png, named after the budget, and what all of a folder's searches share.

    These are pareto.png and search.html.
    """
    stem = result.budget.replace(" ", "-")
    recipe, data, picture = (folder / f"{name}-{stem}.{end}" for name, end in _FILES)
    write_atomically(recipe, result.recipe.to_yaml())
    write_atomically(data, result.to_json())
    heat_map(result, picture)
    pareto, report = folder / "pareto.png", folder / "search.html"
    plot_pareto(read_searches(folder), pareto)
    write_atomically(report, page(search_report(folder)))
    return [recipe, data, picture, pareto, report]


_FILES = (("recipe", "yaml"), ("search", "json"), ("search", "png"))
