"""Widths that a search chooses among: integers by their bits, or other number formats by name. No torch."""

from diffquant.numbers.formats import format_named
from diffquant.scheme import Scheme

Width = int | str
INTEGERS: tuple[Width, ...] = tuple(range(2, 9))


def spoken(width: Width) -> str:
    """A width as people say it: "4 bits", "nvfp4"."""
    return f"{width} bits" if isinstance(width, int) else width


def code_width(width: Width) -> int:
    """Bits of a code, without its share of a scale."""
    return format_named(str(width)).code_width


def scheme_at(width: Width, granularity: str, target: str = "") -> Scheme:
    """The scheme of a width; a format with blocks of its own takes no other granularity."""
    own = format_named(str(width)).block
    return Scheme.parse(str(width) if own else f"{width}:{granularity}", target=target)
