"""Pages of results rendered from their templates.

A template computes: `{{ kv.rotated(4) | shares }}` is a figure, `{{ holds(best == "c32", "has the lowest KL") }}` words
that stop the rendering once they are no longer so. Every module of this folder is known in every template by its name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diffquant.errors import UsageError
from diffquant.measure.stats import Difference
from diffquant.reports.tables import markdown
from research.pages import raw as files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = (
    "figure8",
    "mechanism",
    "needles",
    "weights",
    "codebooks",
    "amounts",
    "leaders",
    "scaled",
    "other_tools",
    "kv",
    "formats",
    "outliers",
    "engines",
    "served",
    "h100",
    "transcripts",
)
# Pages that are written by hand except for blocks between two comments, each rendered from a block of this template.
BLOCKS = "blocks.md.j2"
_BLOCK = re.compile(r"(<!-- rendered: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class DoesNotHoldError(UsageError):
    """Words on a page are not so by its raw files."""


def holds(condition: bool, text: str) -> str:
    """Words that raw files have to bear out.

    Raises:
        DoesNotHoldError: they do not.
    """
    if not condition:
        raise DoesNotHoldError(f"by the raw files this is not so: {text!r}")
    return text


def fixed(value: float, digits: int = 2) -> str:
    """A number with so many digits behind the point, and commas in its thousands."""
    return f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    """The same with its sign."""
    return f"{value:+,.{digits}f}".replace("-", "−")


def digits(value: float, number: int = 3) -> str:
    """A number with so many digits in all."""
    return f"{value:.{number}g}".replace("-", "−")


def percent(value: float, number: int = 0) -> str:
    """A share as percent."""
    return f"{fixed(100 * value, number)} %"


def span(values: Iterable[float], number: int = 2) -> str:
    """The smallest and the largest of some numbers."""
    low, high = (fixed(end, number) for end in ends(values))
    return low if low == high else f"{low} to {high}"


def shares(values: Iterable[float], number: int = 0) -> str:
    """The smallest and the largest of some shares as percent."""
    return f"{span([100 * value for value in values], number)} %"


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest of some values."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def interval(mean: Difference, number: int = 2, sign: bool = False) -> str:
    """A mean with its interval, as in "0.57 [0.45, 0.69]"."""
    shown = signed if sign else fixed
    return f"{shown(mean.mean, number)} [{shown(mean.low, number)}, {shown(mean.high, number)}]"


def negative(mean: Difference) -> Difference:
    """A loss for a gain, with its interval."""
    return Difference(-mean.mean, -mean.high, -mean.low)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(markdown(heads, list(rows)))


FILTERS = (fixed, signed, digits, percent, span, shares, interval, negative)


def modules() -> dict[str, ModuleType]:
    """Modules that compute, by name."""
    return {name: import_module(f"research.pages.{name}") for name in MODULES}


def forget(template: str = "") -> None:
    """Have the modules that a template names, or all modules, read raw files again."""
    text = (HERE / template).read_text(encoding="utf-8") if template else ""
    for cached in (files.raw, files.sweep):
        cached.cache_clear()
    for name, module in modules().items():
        if not template or name in text:
            reload(module)


def environment() -> Environment:
    """Jinja2 with the filters of this module, in which a name that is not known is an error."""
    made = Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters |= {each.__name__: each for each in FILTERS}
    made.globals |= {"holds": holds, "raw": files.raw, "raw_files": files.raw_files, "max": max, "len": len}
    return made


def outputs() -> dict[Path, str]:
    """What every rendered page has to hold, by its path.

    Raises:
        DoesNotHoldError: words of a page are not so by the raw files.
        UsageError: a page asks for a block that the template does not have, or no page for one that it has.
    """
    rendered = {HERE / file.name.removesuffix(".j2"): page_text(file.name) for file in _templates()}
    loaded = environment().get_template(BLOCKS)
    context = loaded.new_context(dict[str, Any](modules()))
    blocks = {name: "".join(block(context)).strip("\n") for name, block in loaded.blocks.items()}
    pages = {
        page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    }
    asked = {name for text in pages.values() for _, name, _ in _BLOCK.findall(text)}
    if asked != set(blocks):
        raise UsageError(f"pages and {BLOCKS} do not have the same blocks: {', '.join(sorted(asked ^ set(blocks)))}")
    return rendered | {page: with_blocks(text, blocks) for page, text in pages.items() if _BLOCK.search(text)}


def page_text(template: str) -> str:
    """A page as its template renders it."""
    head = f"<!-- Rendered from {template} by `make pages`: edit that. -->\n"
    return head + environment().get_template(template).render(modules())


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """A page with its blocks rendered anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{blocks[found[2]]}\n{found[3]}", text)


def _templates() -> list[Path]:
    return [file for file in sorted(HERE.glob("*.md.j2")) if file.name != BLOCKS]
