"""The verb `report`: rewrites the pages of finished runs, with an index."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from diffquant.errors import UsageError
from diffquant.reports.page import Report, Section, render_page
from diffquant.reports.tables import Link, Table
from diffquant.support.files import find_file_or_xz, write_atomically
from diffquant.support.outputs import check_output_file
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, to_path, to_paths

Runs = Annotated[
    kinds.PathText | Sequence[kinds.PathText], kinds.Kind(Path, "RUNS", is_positional=True, is_repeatable=True)
]


@check_arguments
def report(runs: Runs, output: kinds.NewFile | None = None) -> list[Path]:
    """Rewrite the HTML pages of runs, and an index of them.

        diffquant report logits search bench-output

    Runs are folders that sweep, search, outliers or bench wrote. Their pages link to each other and to the index.

    Args:
        runs: folders of runs, or folders that contain them.
        output: index file to write; by default index.html in the folder that contains all runs.

    Returns:
        Paths of the index and of the pages.

    Raises:
        UsageError: there is no run, or a run's numbers cannot be read.
        OutputExistsError: the index would replace a file that diffquant did not write.
    """
    folders, index = to_paths(runs), to_path(output)
    absent = [str(folder) for folder in folders if not folder.is_dir()]
    if absent:
        if files := [str(folder) for folder in folders if folder.is_file()]:
            raise UsageError(f"{', '.join(files)}: give the folder of a run, not a file of it")
        raise UsageError(f"no such folder: {', '.join(absent)}")
    index = index or Path(os.path.commonpath([folder.absolute() for folder in folders])) / "index.html"
    found = find_runs(folders)
    if not found:
        known = ", ".join(_KINDS)
        raise UsageError(f"no run in or below {', '.join(map(str, folders))}: none has a {known}")
    if index.absolute() in found:
        raise UsageError(f"{index} is the page of a run, which the index would replace; choose another output")
    check_output_file(index, _is_index(index))
    pages = list(found)
    index.parent.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(pages):
        near = {"← before": pages[number - 1] if number else None, "all runs": index}
        near["next →"] = pages[number + 1] if number + 1 < len(pages) else None
        links = [Link(text, _relative(target, file)) for text, target in near.items() if target is not None]
        write_atomically(file, render_page(found[file], links))
    write_atomically(index, render_page(_index_report(found, index)))
    return [index, *pages]


def _is_index(file: Path) -> bool:
    return file.is_file() and f"· diffquant {_INDEX}</title>" in file.read_text(encoding="utf-8", errors="replace")


def find_runs(folders: Sequence[Path]) -> dict[Path, Report]:
    """Find the runs in folders and their subfolders; return the report of each run by the path of its HTML page.

    Raises:
        UsageError: a run's numbers cannot be read.
    """
    found: dict[Path, Report] = {}
    for pattern, (name, read) in _KINDS.items():
        files = (file for folder in folders for ending in ("", ".xz") for file in folder.rglob(pattern + ending))
        for place in sorted({file.parent.absolute() for file in files}):
            try:
                found[place / name] = read(place)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise UsageError(f"cannot read {pattern} in {place}: {type(error).__name__}: {error}") from error
    return dict(sorted(found.items()))


def _index_report(runs: Mapping[Path, Report], index: Path) -> Report:
    counts = Counter(report.kind for report in runs.values())
    by_kind = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    headline = [f"{len(runs)} runs by the verb that made them: {by_kind}."]
    rows: list[list[str | Link]] = [
        [
            Link(_relative(file.parent, index), _relative(file, index)),
            report.kind,
            report.date[:10],
            " ".join(report.headline),
        ]
        for file, report in runs.items()
    ]
    table = Table(["run", "verb", "date", "what it shows"], rows, names=3, prose=1)
    return Report(_INDEX, index.absolute().parent.name, headline, "", [Section("Runs", [table])])


def _relative(target: Path, page_file: Path) -> str:
    return Path(os.path.relpath(target.absolute(), page_file.absolute().parent)).as_posix()


def _beside(folder: Path, *names: str) -> list[str]:
    files = [find_file_or_xz(folder / name) for name in names]
    return [file.name for file in files if file.is_file()] + sorted(file.name for file in folder.glob("*.png"))


def _sweep(folder: Path) -> Report:
    from diffquant.measure.sweep.outputs import sweep_report
    from diffquant.measure.sweep.result import read_sweep

    files = _beside(folder, "sweep.json", "table.csv")
    return sweep_report(read_sweep(folder / "sweep.json"), folder.name, files)


def _search(folder: Path) -> Report:
    from diffquant.calib.search.outputs import search_report

    return search_report(folder)


def _outliers(folder: Path) -> Report:
    from diffquant.calib.outlier_result import outlier_report, read_outliers

    return outlier_report(read_outliers(folder / "outliers.json"), folder.name, _beside(folder, "outliers.json"))


def _bench(folder: Path) -> Report:
    from diffquant.benchmarks.cells import read_result
    from diffquant.benchmarks.report import bench_report

    files = _beside(folder, "bench.json", "bench.csv", "bench.md")
    return bench_report(read_result(folder / "bench.json"), folder.name, files)


_INDEX = "runs"
# The raw file of each kind of run, the name of its page, and what reads it.
_KINDS: dict[str, tuple[str, Callable[[Path], Report]]] = {
    "sweep.json": ("report.html", _sweep),
    "search-*.json": ("search.html", _search),
    "outliers.json": ("outliers.html", _outliers),
    "bench.json": ("report.html", _bench),
}
