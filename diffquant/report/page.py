"""Pages of HTML that hold everything they show: text, tables and drawings, one template for all.

A page is data here and becomes HTML in template.html.j2, which escapes every text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class Subtitle:
    """A heading inside a section."""

    text: str
    kind: ClassVar[str] = "subtitle"


@dataclass(frozen=True)
class Note:
    """A paragraph that explains."""

    text: str
    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Items:
    """A list of lines, in red where they are errors."""

    texts: Sequence[str]
    errors: bool = False
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        heads: texts at the heads of the columns.
        rows: texts of each table row, as many as heads.
        shaded: flag of each row that others are compared with; none by default.
        names: number of first columns that hold names, set to the left; the others hold numbers, to the right.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    shaded: Sequence[bool] = ()
    names: int = 1
    kind: ClassVar[str] = "table"

    def is_shaded(self, row: int) -> bool:
        return bool(self.shaded) and self.shaded[row]


@dataclass(frozen=True)
class Drawing:
    """An <svg> element as `plots.as_svg` gives it: the one thing on a page that is not escaped."""

    svg: str
    kind: ClassVar[str] = "drawing"


@dataclass(frozen=True)
class Fold:
    """A block that a click on its summary opens."""

    summary: str
    inside: "Block"
    kind: ClassVar[str] = "fold"


@dataclass(frozen=True)
class Facts:
    """A list of names, each with what is known of it."""

    texts: Mapping[str, str]
    kind: ClassVar[str] = "facts"


Block: TypeAlias = Subtitle | Note | Items | Table | Drawing | Fold | Facts


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


def page(title: str, introduction: Sequence[Block], sections: Sequence[Section]) -> str:
    """A whole HTML document, which loads nothing."""
    # Here, since only a report needs it: commands that draw none start without it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(files(__package__).joinpath("template.html.j2").read_text(encoding="utf-8"))
    return template.render(title=title, introduction=introduction, sections=sections)
