"""The figures of research/pages/formats.md."""

from diffquant.evals.stats import Difference, mean_interval
from research.check.numbers import ends
from research.check.page import RESULTS, Page
from research.check.pages.figure8_seeds import SEEDS
from research.studies.figure8_model import advantage, bits_won
from research.studies.formats import COLUMNS, FULL_SUMS, MODELS, TARGETS, TEXTS, Measured, shown_bits

PAGE = Page("research/pages/formats.md", guides=("Protocol",))
MEASURED = Measured(RESULTS / "formats")


def _lost(model: str, target: str) -> tuple[float, float]:
    """Bits that a model loses on a target: the smallest and the largest mean over its rows and both texts."""
    return ends(MEASURED.lost(model, row, text).mean for row in MEASURED.rows(model, target) for text in TEXTS)


def verdict(target: str, model: str) -> str:
    """A cell of the first table."""
    punished, forgiven, rows = MEASURED.verdicts(model, target)
    low, high = _lost(model, target)
    return f"{low:+.2f} to {high:+.2f}; {punished} and {forgiven} of {rows}".replace("-", "−")


def beside_integers(target: str, model: str) -> str:
    """Bits that nvfp4 loses to integers of 4 bits in groups of 32, which take as many stored bits."""
    return shown_bits(MEASURED.bits((model, f"{target} nvfp4"), (model, f"{target} 4:g32")))


def full_sum(model: str, scheme: str, text: str = "books") -> Difference:
    """Bits that a scheme of P loses by the sum of unrounded weights."""
    return MEASURED.bits((model, f"p {scheme}:fullsum"), (model, f"p {scheme}"), text)


def full_sum_beside(model: str, scheme: str, text: str) -> Difference:
    """Bits that a DIFF model loses more than the Transformer by the sum of unrounded weights, passage by passage."""
    losses = [
        [
            advantage(rounded, full)
            for rounded, full in zip(
                MEASURED.passages(each, f"p {scheme}", text),
                MEASURED.passages(each, f"p {scheme}:fullsum", text),
                strict=True,
            )
        ]
        for each in (model, "Transformer")
    ]
    return mean_interval([ours - others for ours, others in zip(*losses, strict=True)])


def by_full_sum(scheme: str, model: str) -> str:
    """A cell of the table of row sums."""
    return shown_bits(full_sum(model, scheme))


PAGE.table("rounded | " + " | ".join(COLUMNS), MEASURED.cell)
PAGE.table("DIFF against the Transformer | DIFF V1 | DIFF V2", verdict)
PAGE.table("`nvfp4` against `4:g32` | Transformer | DIFF V1 | DIFF V2", beside_integers)
PAGE.table("`fullsum` against the rounded sum | Transformer | DIFF V1 | DIFF V2", by_full_sum)

PAGE.table(
    "SmolLM2-135M | 4:g32 | nvfp4 | mxfp4 | `nvfp4` against `4:g32` | `mxfp4` against `4:g32`", MEASURED.larger_cell
)
_LARGER = {
    target: MEASURED.bits(("SmolLM2-135M", f"{target} nvfp4"), ("SmolLM2-135M", f"{target} 4:g32"))
    for target in TARGETS
}
_POCKET = [
    MEASURED.bits((model, f"{target} nvfp4"), (model, f"{target} 4:g32")).mean
    for model in MODELS
    for target in ("k", "qk")
]
PAGE.means(
    "`nvfp4` loses less than `4:g32` on every tensor but the logits",
    all(each.high < 0 for target, each in _LARGER.items() if target != "logits") and _LARGER["logits"].mean > 0,
)
PAGE.says("gain {} and {} bits by it", -_LARGER["k"].mean, -_LARGER["qk"].mean)
PAGE.says("where the pocket models lose {} to {}", *ends(_POCKET))
PAGE.means(
    "`mxfp4` loses more than `4:g32` on weights, values in the cache and logits",
    all(
        MEASURED.bits(("SmolLM2-135M", f"{target} mxfp4"), ("SmolLM2-135M", f"{target} 4:g32")).low > 0
        for target in ("weights", "v", "logits")
    ),
)
PAGE.says("V1's values lose most, {} to {} bits in the cache", *_lost("DIFF V1", "v"))
PAGE.says("{} to {} as operand", *_lost("DIFF V1", "pv"))
PAGE.means(
    "softmax weights lose as much only by the unrounded sum",
    all(
        MEASURED.lost("DIFF V1", row, text).mean < _lost("DIFF V1", "pv")[0]
        for row in MEASURED.rows("DIFF V1", "p")
        if not row.endswith("fullsum")
        for text in TEXTS
    ),
)
PAGE.says(
    "V2 needs {} to {} bits fewer than the Transformer for values in the cache",
    *sorted(-x for x in _lost("DIFF V2", "v")),
)
PAGE.says("and {} to {} fewer for values as operand", *sorted(-x for x in _lost("DIFF V2", "pv")))
PAGE.says("and {} to {} more for the logits", *_lost("DIFF V2", "logits"))
PAGE.says("its softmax weights lose bits in every row of both texts, {} to {}", *_lost("DIFF V2", "p"))
PAGE.says("its queries and keys at most {}", _lost("DIFF V2", "qk")[1])
PAGE.says("cost V1 {} to {} bits and V2 at most {} more", *_lost("DIFF V1", "like"), _lost("DIFF V2", "like")[1])


def _of_most(model: str, verdict_of: int) -> set[str]:
    """Targets that a model is punished (0) or forgiven (1) in by most of their rows."""
    counts = {target: MEASURED.verdicts(model, target) for target in TARGETS}
    return {target for target, each in counts.items() if 2 * each[verdict_of] > each[2]}


PAGE.means(
    "V2 is forgiven in its values and punished in its logits, softmax weights, and queries and keys",
    _of_most("DIFF V2", 1) == {"v", "pv"} and _of_most("DIFF V2", 0) == {"logits", "p", "qk"},
)
PAGE.means("DIFF V1 is punished nearly everywhere", _of_most("DIFF V1", 0) == set(TARGETS))
PAGE.means(
    "V2's are punished under either sum", MEASURED.verdicts("DIFF V2", "p")[0] == len(MEASURED.rows("DIFF V2", "p"))
)
_GAINS = [scheme for scheme in FULL_SUMS if not scheme.startswith("e4m3")]
PAGE.means(
    "The Transformer and V2 gain by it with integers and `nvfp4` and lose with `e4m3`, and V1 loses in all four, "
    "on both texts",
    all(
        all(full_sum("DIFF V1", scheme, text).low > 0 for scheme in FULL_SUMS)
        and all(full_sum(model, scheme, text).high < 0 for model in ("Transformer", "DIFF V2") for scheme in _GAINS)
        and all(full_sum(model, "e4m3:row", text).low > 0 for model in ("Transformer", "DIFF V2"))
        for text in TEXTS
    ),
)
PAGE.means(
    "goes with the Transformer in all four",
    all(full_sum("DIFF V2", s).mean * full_sum("Transformer", s).mean > 0 for s in FULL_SUMS),
)
_COST = {
    model: [full_sum_beside(model, scheme, text) for scheme in ("e4m3:row", "nvfp4") for text in TEXTS]
    for model in ("DIFF V1", "DIFF V2")
}
PAGE.says(
    "the unrounded sum costs V2 {} to {} bits more than the Transformer",
    *ends(each.mean for each in _COST["DIFF V2"]),
)
PAGE.means("with intervals above zero on both texts", all(each.low > 0 for each in _COST["DIFF V2"]))
PAGE.says("and V1 {} to {}. V1 has", *ends(each.mean for each in _COST["DIFF V1"]))
_KLS = [
    1000 * MEASURED.kl(model, f"p 4:row{end}").mean
    for model in ("DIFF V1", "Transformer", "DIFF V2")
    for end in ("", ":fullsum")
]
PAGE.says(
    "With 4 bits a row V1's KL is {} thousandths of a nat by the sum of rounded weights and {} by the other, the "
    "Transformer's {} and {}, V2's {} and {}",
    *_KLS,
)
PAGE.means(
    "its logits, queries, keys and weights lose bits in every row of both texts, too",
    all(_lost("DIFF V1", target)[0] > 0 for target in ("logits", "qk", "k", "weights")),
)
_BY_ITSELF = {
    scheme: [
        [bits_won(seed[name], seed["Transformer"], scheme) for name in ("DIFF V1", "DIFF V2")]
        for seed in SEEDS.values()
    ]
    for scheme in ("4:tensor", "4:head", "4:row", "4:row:shift")
}
PAGE.means(
    "both DIFF models lose to the Transformer\n  in each of four trainings where each map's "
    "logits are rounded by itself",
    all(won < 0 for trainings in _BY_ITSELF.values() for both in trainings for won in both) and len(SEEDS) == 4,
)
PAGE.means(
    "but in one of them V2 loses more than V1 at `4:tensor`",
    sum(second < first for first, second in _BY_ITSELF["4:tensor"]) == 1,
)
for text in (
    "with 95 % intervals over 16 passages",
    "Both take 4.5 stored bits with groups of 32 and of 16",
    "with 95 % intervals, Student's over 16 passages",
    "That is of heads 32 wide and 1.25 M parameters",
    "and bits with 95 % intervals over those four",
    "Three models of 1.25 M parameters",
    "(1.25 M parameters, one training",
    "take 4.5 bits, `mxfp4` 4.25, `6:g32` 6.5 and `mxfp6` 6.25",
    "with Student's 95 % interval",
):
    PAGE.leaves(text, "a level, a size, or arithmetic")
