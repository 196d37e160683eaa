"""Self-contained HTML pages of text, tables and drawings, all made from one template.

The classes here hold a page's content; template.html.j2 turns it into HTML and escapes every text. A page loads
nothing. Its content security policy allows only page.js, which sorts and filters tables and shows a drawing's values.
`write_run` writes a run's folder: texts, pictures, and a page that links to them.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, TypeAlias

from diffquant.errors import UsageError
from diffquant.reports.tables import Link, Table
from diffquant.support.files import write_atomically
from diffquant.support.terminal import escape_hidden

_NUMBER = re.compile(r"[+-]?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?", re.IGNORECASE)
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


# A title, "" for none, and an <svg> element of `plots.as_svg`, which is the only content of a page that is not escaped.
Drawing = tuple[str, str]
# A legend entry: the colour of a series, such as "#0072B2", a character shaped like its marker, and a text.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Charts:
    """Drawings with a common legend.

    They are side by side, or one below the other on a narrow page.

    Attributes:
        drawings: drawings in order.
        keys: legend entries; none by default.
    """

    drawings: Sequence[Drawing]
    keys: Sequence[Key] = ()
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class Section:
    """Blocks under a heading.

    A section inside another one has a smaller heading. If `folded`, the blocks are hidden until the heading is clicked.
    """

    title: str
    blocks: "Sequence[Block]"
    folded: bool = False
    kind: ClassVar[str] = "section"


# A str is a paragraph, a list of them one of bullets; a mapping is a list of names with their values.
Block: TypeAlias = str | list[str] | Mapping[str, str] | Table | Charts | Section


@dataclass(frozen=True)
class Report:
    """The content of a run's page.

    Attributes:
        kind: name of the command that made the run, such as "sweep".
        name: name of the run's folder.
        headline: sentences that summarize the run.
        date: date of the run; "" if none was recorded.
        sections: sections, the most important first.
        files: names of files in the same folder with the run's numbers and pictures.
    """

    kind: str
    name: str
    headline: Sequence[str]
    date: str
    sections: Sequence[Section]
    files: Sequence[str] = ()


def write_run(
    folder: Path,
    texts: Mapping[str, str],
    pictures: Mapping[str, Callable[[Path], object]],
    page_name: str,
    report: Callable[[str, Sequence[str]], Report],
    written_files: Sequence[str] = (),
) -> list[Path]:
    """Write a run's texts, pictures and page into a folder.

    Args:
        folder: folder of the run; it is created if it does not exist.
        texts: texts by file name, written first.
        pictures: functions that draw into a file, by file name. If one raises UsageError, the run has no such picture,
            and an existing file with its name is removed.
        page_name: file name of the page.
        report: function that returns the page's content, given the run's name and the names of the files to link to.
        written_files: names of the run's files that are already written; the page links to them, too.

    Returns:
        Paths of the texts, of the pictures that were drawn, and of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    drawn = [name for name, draw in pictures.items() if _is_drawn(draw, folder / name)]
    made = [*texts, *drawn]
    write_atomically(folder / page_name, render_page(report(folder.absolute().name, [*written_files, *made])))
    return [folder / name for name in (*made, page_name)]


def render_page(report: Report, links: Sequence[Link] = ()) -> str:
    """Return a report as an HTML document that loads no other files.

    Args:
        links: other pages to link to.
    """
    # Imported here, since only commands that write a report need it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        # Text that the template marks as safe is of a subclass of str, so it is not escaped.
        finalize=lambda value: escape_hidden(value) if type(value) is str else value,
    )
    environment.filters["sort_value"] = sort_value
    template, style, script = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("template.html.j2", "page.css", "page.js")
    )
    return environment.from_string(template).render(
        report=report,
        links=[*links, *(Link(name, name) for name in report.files)],
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def sort_value(text: str | Link) -> float | None:
    """Return the number at the start of a cell's text, or None if the text does not start with a number.

    A size such as "1.5 MB" is returned in bytes.
    """
    shown = str(text)
    number = _NUMBER.match(shown)
    if number is None:
        return None
    unit = re.split("[,/]", shown[number.end() :])[0].strip()
    return float(number[0].replace(",", "")) * _UNITS.get(unit, 1.0)


def format_settings(values: Mapping[str, object]) -> dict[str, str]:
    """Return a run's settings as texts by name, without settings that are None or empty."""
    return {name: _value_text(value) for name, value in values.items() if value not in (None, "", [], ())}


def _value_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if key != "name" and inner is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _is_drawn(draw: Callable[[Path], object], file: Path) -> bool:
    with TemporaryDirectory() as folder:
        drawn = Path(folder) / file.name
        try:
            draw(drawn)
        except UsageError:
            file.unlink(missing_ok=True)
            return False
        write_atomically(file, drawn.read_bytes())
    return True
