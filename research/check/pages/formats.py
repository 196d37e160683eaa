"""The figures of research/pages/formats.md."""

from collections.abc import Iterable

from research.check.page import RESULTS, Page
from research.studies.formats import COLUMNS, MISSING, TEXTS, Measured

PAGE = Page("research/pages/formats.md", guides=("Protocol",))
MEASURED = Measured(RESULTS / "formats")


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The smallest and the largest of some values."""
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _lost(model: str, target: str) -> tuple[float, float]:
    """Bits that a model loses on a target: the smallest and the largest mean over its rows and both texts."""
    return _ends(MEASURED.lost(model, row, text).mean for row in MEASURED.rows(model, target) for text in TEXTS)


def verdict(target: str, model: str) -> str:
    """A cell of the first table."""
    if not MEASURED.rows(model, target):
        return MISSING
    punished, forgiven, rows = MEASURED.verdicts(model, target)
    low, high = _lost(model, target)
    return f"{low:+.2f} to {high:+.2f}; {punished} and {forgiven} of {rows}".replace("-", "−")


def beside_integers(target: str, model: str) -> str:
    """Bits that nvfp4 loses to integers of 4 bits in groups of 32, which take as many stored bits."""
    if f"{target} nvfp4" not in MEASURED.rows(model):
        return MISSING
    lost = MEASURED.bits((model, f"{target} nvfp4"), (model, f"{target} 4:g32"))
    return f"{lost.mean:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}]".replace("-", "−")


def by_full_sum(scheme: str, model: str) -> str:
    """Bits that a scheme of P loses by the sum of unrounded weights."""
    if not {f"p {scheme}", f"p {scheme}:fullsum"} <= set(MEASURED.rows(model)):
        return MISSING
    lost = MEASURED.bits((model, f"p {scheme}:fullsum"), (model, f"p {scheme}"))
    return f"{lost.mean:+.2f} [{lost.low:+.2f}, {lost.high:+.2f}]".replace("-", "−")


PAGE.table("rounded | " + " | ".join(COLUMNS), MEASURED.cell)
PAGE.table("DIFF against the Transformer | DIFF V1 | DIFF V2", verdict)
PAGE.table("`nvfp4` against `4:g32` | Transformer | DIFF V1 | DIFF V2", beside_integers)
PAGE.table("`fullsum` against the rounded sum | Transformer | DIFF V1 | DIFF V2", by_full_sum)

PAGE.says("V1's values lose most, {} to {} bits in the cache", *_lost("DIFF V1", "v"))
PAGE.says("{} to {} as operand", *_lost("DIFF V1", "pv"))
PAGE.says(
    "V2 needs {} to {} bits fewer than the Transformer for values in the cache",
    *sorted(-x for x in _lost("DIFF V2", "v")),
)
PAGE.says("and {} to {} more for the logits", *_lost("DIFF V2", "logits"))
_FULL = {
    (model, scheme): MEASURED.bits((model, f"p {scheme}:fullsum"), (model, f"p {scheme}"))
    for model in ("Transformer", "DIFF V1")
    for scheme in ("8:row", "4:row", "nvfp4", "e4m3:row")
}
PAGE.means(
    "The Transformer gains by it with integers and `nvfp4`, and V1 loses in all four",
    all(_FULL["DIFF V1", s].low > 0 for s in ("8:row", "4:row", "nvfp4", "e4m3:row"))
    and all(_FULL["Transformer", s].high < 0 for s in ("8:row", "4:row", "nvfp4")),
)
_SHARES = {model: 1000 * MEASURED.kl(model, "p 4:row").mean for model in ("Transformer", "DIFF V1")}
_FULLS = {model: 1000 * MEASURED.kl(model, "p 4:row:fullsum").mean for model in ("Transformer", "DIFF V1")}
PAGE.says(
    "With 4 bits a row V1's KL is {} thousandths of a nat by the sum of rounded weights and {} by the other, the "
    "Transformer's {} and {}",
    _SHARES["DIFF V1"],
    _FULLS["DIFF V1"],
    _SHARES["Transformer"],
    _FULLS["Transformer"],
)
PAGE.means(
    "its logits, queries, keys and weights lose bits in every row of both texts, too",
    all(_lost("DIFF V1", target)[0] > 0 for target in ("logits", "qk", "k", "weights")),
)
_V2 = [scheme for scheme in ("8:row", "4:row", "nvfp4") if by_full_sum(scheme, "DIFF V2") != MISSING]
PAGE.means(
    "goes with the Transformer in what was measured of it",
    all(MEASURED.bits(("DIFF V2", f"p {s}:fullsum"), ("DIFF V2", f"p {s}")).high < 0 for s in _V2),
)
for text in (
    "with 95 % intervals over 16 passages",
    "Both take 4.5 stored bits with groups of 32 and of 16",
    "with 95 % intervals, Student's over 16 passages",
    "Three models of 1.25 M parameters",
    "(1.25 M parameters, one training",
    "take 4.5 bits, `mxfp4` 4.25, `6:g32` 6.5 and `mxfp6` 6.25",
    "with Student's 95 % interval",
):
    PAGE.leaves(text, "a level, a size, or arithmetic")
