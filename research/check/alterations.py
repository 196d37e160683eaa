"""Alterations of the pages that a check of them has to notice: an audit's, and ones that a seeded program draws."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from research.check.page import ROOT, Page
from research.check.reading import is_told


@dataclass(frozen=True)
class Alteration:
    """A page with one place changed.

    Attributes:
        text: the whole page as altered.
        change: the place, before and after.
    """

    page: str
    text: str
    change: str


# What an alteration makes of a number word, a comparative, a verdict, a quantifier, or a negation.
_OTHER = {
    **{"two": "seven", "three": "nine", "four": "fourteen", "five": "two", "six": "sixteen", "seven": "three"},
    **{"eight": "three", "nine": "two", "ten": "forty", "twelve": "twenty", "sixteen": "six", "twenty": "ninety"},
    **{"half": "tenth", "third": "tenth", "thirds": "tenths", "quarter": "tenth", "tenth": "half", "tenths": "halves"},
    **{"fifth": "half", "hundred": "thousand", "twice": "once", "once": "twice", "first": "last", "second": "first"},
    **{"all": "few", "none": "some", "most": "few", "every": "hardly any", "each": "one", "both": "neither"},
    **{"nearly": "far from", "hardly": "clearly", "only": "also", "less": "more", "more": "less", "fewer": "more"},
    **{"least": "most", "best": "worst", "better": "worse", "worse": "better", "lower": "higher", "higher": "lower"},
    **{"lowest": "highest", "highest": "lowest", "larger": "smaller", "smaller": "larger", "largest": "smallest"},
    **{"smallest": "largest", "faster": "slower", "slower": "faster", "longer": "shorter", "shorter": "longer"},
    **{"wider": "narrower", "above": "below", "below": "above", "ahead": "behind", "behind": "ahead", "level": "ahead"},
    **{"not": "", "no": "some", "never": "always", "nothing": "something", "nobody": "somebody", "cannot": "can"},
    **{"without": "with", "neither": "both", "nor": "or", "always": "never", "equal": "unequal", "same": "other"},
}
_WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(_OTHER)})(?![\w-])")


def drawn(pages: list[Page], number: int, seed: int) -> Iterator[Alteration]:
    """Alterations of words at random places that tell results, each place as likely as any other."""
    places = [(page, *place) for page in pages for place in _places(page)]
    for page, line, start, end in random.Random(seed).sample(places, number):
        lines = (ROOT / page.name).read_text(encoding="utf-8").split("\n")
        before = lines[line]
        lines[line] = before[:start] + _OTHER[before[start:end]] + before[end:]
        change = (
            f"{page.name}:{line + 1}: {before[max(0, start - 30) : end + 30]!r} -> {lines[line][start : start + 20]!r}"
        )
        yield Alteration(page.name, "\n".join(lines), change)


def _places(page: Page) -> list[tuple[int, int, int]]:
    """Line, start and end of every word of a page that an alteration may change, outside of code and of links."""
    document = page.document()
    lines = (ROOT / page.name).read_text(encoding="utf-8").split("\n")
    told = [each for each in (*document.passages, *document.cells) if is_told(page, each)]
    numbers = sorted({n for each in told for n in range(each.first - 1, each.first - 1 + len(each.starts))})
    code = re.compile(r"`[^`]*`|\]\([^)]*\)")
    return [
        (number, *match.span())
        for number in numbers
        for match in _WORD.finditer(code.sub(lambda span: " " * len(span.group()), lines[number]))
    ]


def audited() -> Iterator[Alteration]:
    """An audit's alterations, or what stands for one whose sentence was corrected since; not those that are gone."""
    for page, old, new in json.loads((Path(__file__).parent / "audited.json").read_text(encoding="utf-8")):
        text = (ROOT / page).read_text(encoding="utf-8")
        pattern = re.compile(r"\s+".join(map(re.escape, old.split())))
        if match := pattern.search(text):
            altered = text[: match.start()] + new + text[match.end() :]
            yield Alteration(page, altered, f"{page}: {old!r} -> {new!r}")
