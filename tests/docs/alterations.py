"""Alterations of the pages that a check of them has to notice: an audit's, and ones that a seeded program draws."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.page import ROOT, Page
from tests.docs.reading import is_told


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
    for page, old, new in _AUDITED:
        text = (ROOT / page).read_text(encoding="utf-8")
        pattern = re.compile(r"\s+".join(map(re.escape, old.split())))
        if pattern.search(text):
            yield Alteration(page, pattern.sub(lambda _, new=new: new, text, count=1), f"{page}: {old!r} -> {new!r}")


_AUDITED = (
    (
        "README.md",
        "generated 88 tokens per second, 6.1 times",
        "generated 98 tokens per second, 6.1 times",
    ),
    (
        "README.md",
        "210 weights packed at 4.50 stored bits each",
        "210 weights packed at 4.40 stored bits each",
    ),
    (
        "README.md",
        "relative RMS error 10.17% on average",
        "relative RMS error 9.17% on average",
    ),
    (
        "README.md",
        "289.3 MB from the source's 98.4 MB, in 20.8 s",
        "289.3 MB from the source's 98.4 MB, in 2.8 s",
    ),
    (
        "README.md",
        "in each of four trainings, DIFF lost more",
        "in each of fourteen trainings, DIFF lost more",
    ),
    (
        "README.md",
        "lost less than half as many bits",
        "lost less than a tenth as many bits",
    ),
    (
        "README.md",
        "`gptq` takes less than half the time",
        "`gptq` takes less than a tenth of the time",
    ),
    (
        "README.md",
        "level with it on their plain Transformer",
        "ahead of it on their plain Transformer",
    ),
    (
        "README.md",
        "In short windows it has the lowest KL",
        "In short windows it has half the KL",
    ),
    (
        "README.md",
        "`--weights 4:g32`, 4.5 stored bits",
        "`--weights 4:g32`, 3.5 stored bits",
    ),
    (
        "README.md",
        "layer by layer, by six routes",
        "layer by layer, by sixteen routes",
    ),
    (
        "docs/claims.md",
        "of the 18 intervals over windows 14 lie below zero, one above",
        "of the 18 intervals over windows 18 lie below zero, none above",
    ),
    (
        "docs/claims.md",
        "41 to 62 % less at 4.5 bits",
        "61 to 82 % less at 4.5 bits",
    ),
    (
        "docs/claims.md",
        "54 to 94 % of the loss remains",
        "14 to 24 % of the loss remains",
    ),
    (
        "docs/claims.md",
        "have 17 to 29 % less KL",
        "have 37 to 49 % less KL",
    ),
    (
        "docs/claims.md",
        "(0.95 of a DiffLlama's)",
        "(0.99 of a DiffLlama's)",
    ),
    (
        "docs/claims.md",
        "which flatters 4-bit grids",
        "which does not flatter 4-bit grids",
    ),
    (
        "docs/claims.md",
        "of 401 in the numerics",
        "of 431 in the numerics",
    ),
    (
        "docs/figure8.md",
        "V1 needs 0.5 to 0.7 bits more than the Transformer, V2 0.2 to 0.5",
        "V1 needs 0.3 to 0.7 bits more than the Transformer, V2 0.2 to 0.5",
    ),
    (
        "docs/figure8.md",
        "| `4:tensor` | +3.5 %, 0.042 | +8.8 %, 0.11 | +7.2 %, 0.078 |",
        "| `4:tensor` | +3.5 %, 0.042 | +8.8 %, 0.11 | +7.3 %, 0.078 |",
    ),
    (
        "docs/figure8.md",
        "by 44 to 56 of 100 numbers, and V2 nowhere",
        "by 44 to 86 of 100 numbers, and V2 nowhere",
    ),
    (
        "docs/figure8.md",
        "V1 wins four, at 3",
        "V1 wins nine, at 3",
    ),
    (
        "docs/figure8.md",
        "Of these 24 comparisons V1 wins eight and V2 five",
        "Of these 24 comparisons V1 wins nine and V2 five",
    ),
    (
        "docs/figure8.md",
        "leads in two thirds of the cells, with `alike` or without, and V2 in five of twelve",
        "leads in nine tenths of the cells, with `alike` or without, and V2 in eleven of twelve",
    ),
    (
        "docs/figure8.md",
        "it costs each of the models 0.2 % of perplexity or less",
        "it costs each of the models 0.1 % of perplexity or less",
    ),
    (
        "docs/figure8.md",
        "DIFF loses on every book, and on each of the 16 passages",
        "DIFF loses on every book, and on each of the 26 passages",
    ),
    (
        "docs/figure8.md",
        "V2's largest is half the Transformer's",
        "V2's largest is a tenth the Transformer's",
    ),
    (
        "docs/figure8.md",
        "Two thirds of V1's cost and over half of V2's remain",
        "Nine tenths of V1's cost and over half of V2's remain",
    ),
    (
        "docs/figure8.md",
        "KL doubles from step 600 to the end",
        "KL triples from step 600 to the end",
    ),
    (
        "docs/figure8.md",
        "The norm adds at most a fifth",
        "The norm adds at most a tenth",
    ),
    (
        "docs/figure8-seeds.md",
        "−0.57 [−0.78, −0.36]",
        "−0.57 [−0.68, −0.46]",
    ),
    (
        "docs/figure8-seeds.md",
        "All models read the same 21 windows of 256 tokens",
        "All models read the same 210 windows of 256 tokens",
    ),
    (
        "docs/rounding.md",
        "| tuned 4:g32 | 4.5 | 444 | 39.419",
        "| tuned 4:g32 | 4.5 | 344 | 39.419",
    ),
    (
        "docs/rounding.md",
        "0.0498 ± 0.0065",
        "0.0498 ± 0.0055",
    ),
    (
        "docs/rounding.md",
        "14 lie below zero and one above",
        "16 lie below zero and one above",
    ),
    (
        "docs/rounding.md",
        "`mse` leads in 7 of the 16 combinations",
        "`mse` leads in 9 of the 16 combinations",
    ),
    (
        "docs/rounding.md",
        "(200 steps of eight windows, signed gradients",
        "(20 steps of eight windows, signed gradients",
    ),
    (
        "docs/rounding.md",
        "150 steps of Adam",
        "15 steps of Adam",
    ),
    (
        "docs/rounding.md",
        "chosen among seven pairs of values",
        "chosen among three pairs of values",
    ),
    (
        "docs/kv.md",
        "Keeping the newest 32 tokens at 16 bits takes 95 to 97 %",
        "Keeping the newest 32 tokens at 16 bits takes 85 to 97 %",
    ),
    (
        "docs/kv.md",
        "all three want the wider values",
        "all three want the wider keys",
    ),
    (
        "docs/kv.md",
        "one lies below zero, by less than 0.001 nats, and none above",
        "one lies below zero, by less than 0.001 nats, and two above",
    ),
    (
        "docs/qk.md",
        "four lie below zero as a whole and one above",
        "nine lie below zero as a whole and one above",
    ),
    (
        "docs/qk.md",
        "2.6 to 3.7 times as large per tensor",
        "2.6 to 4.7 times as large per tensor",
    ),
    (
        "docs/search.md",
        "five cause 30 % and 21 cause 51 %",
        "five cause 40 % and 21 cause 51 %",
    ),
    (
        "docs/search.md",
        "17 to 24 % less KL in the Transformer and V1",
        "27 to 34 % less KL in the Transformer and V1",
    ),
    (
        "docs/search.md",
        "none of the 210 weights gets another width",
        "three of the 210 weights get another width",
    ),
    (
        "docs/sweep.md",
        "| logits 4:tensor | 35.9 | 0.75 | 0.36 |",
        "| logits 4:tensor | 35.9 | 0.85 | 0.36 |",
    ),
    (
        "docs/sweep.md",
        "it stores at most 0.30 of 16 bits",
        "it stores at most 0.20 of 16 bits",
    ),
    (
        "docs/verify.md",
        "8.7e-02 of 3e-01",
        "8.7e-02 of 2e-01",
    ),
    (
        "docs/verify.md",
        "none of 15 sound exports",
        "none of 55 sound exports",
    ),
    (
        "docs/reliability.md",
        "| kills, export | 4008928 | 44 | 44 |",
        "| kills, export | 4008928 | 440 | 440 |",
    ),
    (
        "docs/onnx.md",
        "255.4 / 192.3",
        "265.4 / 192.3",
    ),
    (
        "docs/onnx.md",
        "In decode, onnxruntime-genai is ahead",
        "In decode, onnxruntime-genai is level",
    ),
    (
        "docs/onnx.md",
        "We aimed at 0.9",
        "We aimed at 0.7",
    ),
    (
        "docs/kernels.md",
        "within limits of 2 % for int8 and 8 % for e4m3",
        "within limits of 1 % for int8 and 2 % for e4m3",
    ),
    (
        "docs/bench.md",
        "0.92 to 0.96 of the Transformer's",
        "0.92 to 0.99 of the Transformer's",
    ),
    (
        "docs/bench.md",
        "by how much nobody has measured on a GPU",
        "by how much was measured on a GPU",
    ),
    (
        "docs/models.md",
        "Motif-2.6B",
        "Motif-2.7B",
    ),
    (
        "diffquant/data/pocket/README.md",
        "| `4:tensor` | 0.99 | 0.82 | 0.56 | 0.99 | 0.30 | 0.86 |",
        "| `4:tensor` | 0.99 | 0.82 | 0.56 | 0.99 | 0.30 | 0.76 |",
    ),
    (
        "diffquant/data/pocket/README.md",
        "| DIFF V1 | 5 | 1, by step 100",
        "| DIFF V1 | 5 | 2, by step 100",
    ),
    (
        "diffquant/data/pocket/README.md",
        "V1 little more than half and V2 a third",
        "V1 nearly nine tenths and V2 a third",
    ),
    (
        "CHANGELOG.md",
        "more than ten times as fast as by transformers' loader",
        "more than thirty times as fast as by transformers' loader",
    ),
    (
        "CHANGELOG.md",
        "on DIFF V2 mostly",
        "on DIFF V2 never",
    ),
    (
        "docs/cluster.md",
        "two cores",
        "twelve cores",
    ),
    (
        "docs/quantize.md",
        "took 12.3 s (16.1 s",
        "took 11.3 s (16.1 s",
    ),
    (
        "docs/quantize.md",
        "`gptq` took 150 s",
        "`gptq` took 50 s",
    ),
)
