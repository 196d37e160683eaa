"""The files that a search leaves: recipe, numbers, plots and report."""

import os
from collections.abc import Collection
from pathlib import Path

from diffquant.calib.search.plots import heat_map, plot_pareto
from diffquant.calib.search.report import search_report
from diffquant.calib.search.result import SearchResult, read_search, read_searches
from diffquant.errors import OutputExistsError
from diffquant.report.page import page
from diffquant.source.source import Source
from diffquant.support.files import write_atomically
from diffquant.support.outputs import RunFiles, check_replaced, has_fields


def write_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write recipe.yaml, search.json and search.png, named after the budget, and what all of a folder's searches share.

    These are pareto.png and search.html.

    Raises:
        OutputExistsError: the folder holds files of these names that no search wrote.
    """
    check_search_output(result.budget, folder)
    recipe, data, picture = (folder / name for name in _names(result.budget))
    write_atomically(recipe, result.recipe.to_yaml())
    write_atomically(data, result.to_json())
    heat_map(result, picture)
    pareto, report = (folder / name for name in _SHARED)
    plot_pareto(read_searches(folder), pareto)
    write_atomically(report, page(search_report(folder)))
    return [recipe, data, picture, pareto, report]


def check_search_output(budget: str, folder: Path) -> None:
    """Check, before the work, that a search's files can be written and replace none but those of earlier searches.

    Raises:
        OutputExistsError: files of these names are there that no search wrote.
        UsageError: nothing can be written there.
    """
    recipe, data, picture = _names(budget)
    RunFiles(data, _FIELDS, (recipe, picture)).check(folder)
    shared = [name for name in _SHARED if os.path.lexists(folder / name)]
    is_of_searches = any(has_fields(file, _FIELDS) for file in folder.glob("search-*.json"))
    check_replaced(folder, shared, shared if is_of_searches else ())


def check_same_search(budget: str, source: Source, targets: Collection[str], folder: Path) -> None:
    """Check, before the work, that an earlier search under this budget was of the same model and targets.

    Raises:
        OutputExistsError: it was of others, whose recipe would be replaced.
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
            f"{file} is of {earlier.model} ({found}) and would be replaced by a search of {namesake}{source.path.name} "
            f"({', '.join(targets)}); choose another output"
        )


def _names(budget: str) -> list[str]:
    stem = budget.replace(" ", "-")
    return [f"recipe-{stem}.yaml", f"search-{stem}.json", f"search-{stem}.png"]


_FIELDS = frozenset({"budget", "candidates", "measurements", "settings"})
_SHARED = ("pareto.png", "search.html")
