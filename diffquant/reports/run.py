"""Writes the files of a run into its folder: texts, pictures, and a page that links to them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.reports.page import Report, page
from diffquant.support.files import write_atomically


def write_run(
    folder: Path,
    texts: Mapping[str, str],
    pictures: Mapping[str, Callable[[Path], object]],
    page_name: str,
    report: Callable[[str, Sequence[str]], Report],
    beside: Sequence[str] = (),
) -> list[Path]:
    """Write a run's files.

    Args:
        texts: texts by file name, written first.
        pictures: functions that draw into a file, by file name. One that raises UsageError has nothing to draw; an
            earlier run's picture is then removed.
        page_name: file name of the page.
        report: function that makes the report from the run's name and the names of the files that its page links to.
        beside: names of files of the run that were already written.

    Returns:
        Paths of the texts, the pictures and the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    drawn = [name for name, draw in pictures.items() if _is_drawn(draw, folder / name)]
    files = [*texts, *drawn]
    write_atomically(folder / page_name, page(report(folder.absolute().name, [*beside, *files])))
    return [folder / name for name in (*files, page_name)]


def _is_drawn(draw: Callable[[Path], object], file: Path) -> bool:
    try:
        draw(file)
    except UsageError:
        file.unlink(missing_ok=True)
        return False
    return True
