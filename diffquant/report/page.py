"""Pages of HTML that hold everything they show: text, tables and drawings, one template for all.

A page is data here and becomes HTML in template.html.j2, which escapes every text. It loads nothing, and its policy
lets no script run but page.js, which sorts and filters tables and shows the values of a drawing.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar, TypeAlias
from urllib.parse import quote

from diffquant.support.escaping import visible

# Tables with more rows have a field that filters them.
_FEW_ROWS = 12
_NUMBER = re.compile(r"[+-]?(?:\d[\d,]*)?\.?\d+(?:e[+-]?\d+)?", re.IGNORECASE)
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@dataclass(frozen=True)
class Link:
    """A text that leads to a file.

    Attributes:
        path: path of the file from the page's folder, with slashes.
    """

    text: str
    path: str

    @property
    def address(self) -> str:
        """The path as a page writes it; never one that leaves the disk."""
        return quote(self.path if self.path.startswith((".", "/")) else f"./{self.path}")


@dataclass(frozen=True)
class Items:
    """A list of lines, in red where they are errors."""

    texts: Sequence[str]
    errors: bool = False
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Table:
    """A table of texts, which a click on a head sorts.

    Attributes:
        heads: texts at the heads of the columns.
        rows: texts or links of each table row, as many as heads.
        shaded: flag of each row that others are compared with; none by default.
        names: number of first columns that hold names, set to the left; the others hold numbers, to the right.
        prose: number of last columns that hold sentences, which break into lines.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    shaded: Sequence[bool] = ()
    names: int = 1
    prose: int = 0
    kind: ClassVar[str] = "table"

    @property
    def is_filtered(self) -> bool:
        return len(self.rows) > _FEW_ROWS

    def is_shaded(self, row: int) -> bool:
        return bool(self.shaded) and self.shaded[row]


@dataclass(frozen=True)
class Drawing:
    """An <svg> element as `plots.as_svg` gives it, under a title: the one thing on a page that is not escaped."""

    svg: str
    title: str = ""
    kind: ClassVar[str] = "drawing"


@dataclass(frozen=True)
class Key:
    """A legend's entry.

    Attributes:
        colour: colour of a series, as "#0072B2".
        glyph: letter in the form of its marker.
    """

    colour: str
    glyph: str
    text: str


@dataclass(frozen=True)
class Charts:
    """Drawings side by side under one legend, below one another where the page is narrow."""

    drawings: Sequence[Drawing]
    keys: Sequence[Key] = ()
    kind: ClassVar[str] = "charts"


@dataclass(frozen=True)
class Fold:
    """Blocks that a click on their summary opens."""

    summary: str
    inside: "Sequence[Block]"
    kind: ClassVar[str] = "fold"


@dataclass(frozen=True)
class Section:
    """Blocks under a heading, which is a smaller one inside another section."""

    title: str
    blocks: "Sequence[Block]"
    kind: ClassVar[str] = "section"


# A text is a paragraph that explains, and a mapping a list of names, each with what is known of it.
Block: TypeAlias = str | Mapping[str, str] | Items | Table | Drawing | Charts | Fold | Section


@dataclass(frozen=True)
class Report:
    """One run's part of a page.

    Attributes:
        kind: verb that made the run, such as "sweep".
        name: name of the run, which its folder has.
        headline: sentences that say what the run shows.
        date: date of the run, "" if none was noted.
        sections: sections in order, what matters first.
        files: names of the files beside the page that hold the run's numbers and pictures.
    """

    kind: str
    name: str
    headline: Sequence[str]
    date: str
    sections: Sequence[Section]
    files: Sequence[str] = ()


def page(report: Report, links: Sequence[Link] = ()) -> str:
    """A whole HTML document, which loads nothing.

    Args:
        links: other pages that it leads to.
    """
    # Here, since only a report needs it: commands that draw none start without it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        # What the template marks safe is a str of a class of its own.
        finalize=lambda value: visible(value) if type(value) is str else value,
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
    """The number at the start of a cell's text, in bytes if it is a size, or None."""
    shown = text.text if isinstance(text, Link) else text
    number = _NUMBER.match(shown)
    if number is None:
        return None
    unit = re.split("[,/]", shown[number.end() :])[0].strip()
    return float(number[0].replace(",", "")) * _UNITS.get(unit, 1.0)
