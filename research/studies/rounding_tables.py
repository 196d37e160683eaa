"""Tables of what quantized weights cost: each method with its intervals, and who leads at equal bits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffquant.measure.stats import Difference, mean_interval, paired_difference
from diffquant.reports.tables import markdown
from research.studies.quantizers import METHODS, RULES, VARIANTS
from research.studies.rounding_method import TIERS
from research.studies.text_quantizers import TEXT_METHODS

FULL = "16 bits"
_GPTQ = "gptq"
# What the names of methods that read a text begin with.
READERS = (_GPTQ, "tuned", *(method.name for method in TEXT_METHODS))
_LEADING = tuple(method.name for method in METHODS if method.name.startswith(RULES[1:]))


def method_table(result: dict[str, Any], tiers: Sequence[str] = TIERS) -> str:
    """Markdown with a row for each method, tier by tier.

    Perplexity and HellaSwag stand with the 95 % interval of their change from 16 bits over the same windows or items,
    KL with half of its own. A row that kept no windows has no interval. CPU seconds are those of quantizing, where one
    kind of machine measured all rows.
    """
    rows = result["results"]
    names = [name for name in (FULL, *_names(tiers)) if name in rows]
    heads = [
        *(["CPU seconds"] if _is_timed(result) else []),
        "perplexity",
        "KL, nats",
        "elsewhere: perplexity",
        "KL, nats",
        *(["HellaSwag"] if _has_items(result) else []),
    ]
    return "\n".join(
        markdown(["method", "bits", *heads], [[name, _bits(rows[name]), *method_cells(result, name)] for name in names])
    )


def size_table(results: Sequence[dict[str, Any]], tiers: Sequence[str]) -> str:
    """Markdown with KL of each method on the prose and elsewhere, models side by side, tier by tier."""
    heads = [head for result in results for head in (f"{result['settings']['model']}: KL, nats", "elsewhere")]
    rows = [
        [name, *size_cells(results, name)]
        for name in _names(tiers)
        if all("elsewhere" in result["results"].get(name, {}) for result in results)
    ]
    return "\n".join(markdown(["method", "bits", *heads], rows))


def size_cells(results: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Cells of a method's row: its bits on the models, and KL on the two texts of each."""
    rows = [result["results"][name] for result in results]
    scores = [_kl(texts) for row in rows for texts in (row, row["elsewhere"])]
    return [_bits(*rows), *scores]


def _names(tiers: Sequence[str]) -> list[str]:
    """Names of the methods of some tiers, tier by tier."""
    methods = (*METHODS, *TEXT_METHODS, *VARIANTS)
    return list(dict.fromkeys(method.name for tier in tiers for method in methods if method.tier == tier))


def method_cells(result: dict[str, Any], name: str) -> list[str]:
    """Cells of a method's row after its bits."""
    row, full = result["results"][name], result["results"].get(FULL, {})
    if "kl" not in row:
        cells = [f"not measured: {row['missing']}", "-", "-", "-"]
    else:
        cells = [*_scores(row, full), *_scores(row.get("elsewhere", {}), full.get("elsewhere", {}))]
    if _is_timed(result):
        cells = [f"{row['cpu_seconds']:,.0f}" if "cpu_seconds" in row else "-", *cells]
    return [*cells, _accuracy(row, full)] if _has_items(result) else cells


def lead_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown with KL of our roundings less that of the best method of another library in their tier, by model.

    `mse` is compared with the methods that read no text, `gptq` and `tuned` with all. The best other is the one of the
    lowest KL on the prose; the same stands on the other text. Options of ours stand in `option_table`.
    """
    lines = [lead for result in results for tier in _tiers(result) for lead in _leads(result, tier)]
    return "\n".join(markdown(["model", "bits", "ours", "best other", "KL less, nats", "elsewhere"], lines))


def lead(result: dict[str, Any], ours: str) -> tuple[str, Difference | None, Difference | None]:
    """The best method of another library in a tier, and what `ours` has of KL less its own on the prose and elsewhere.

    There is no difference where one of the two kept no windows.
    """
    rows = result["results"]
    reads = ours.startswith(READERS)
    others = [
        name
        for name, row in rows.items()
        if not name.startswith(RULES)
        and "kl" in row
        and row.get("tier") == rows[ours]["tier"]
        and (reads or not name.startswith(READERS))
    ]
    best = min(others, key=lambda name: float(rows[name]["kl"]))
    return best, *kl_less(result, ours, best)


def option_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown with KL of gptq under each of its options less that of gptq by itself, by model."""
    heads = ["model", "gptq", "bits", "KL, nats", "more than by itself", "elsewhere: KL, nats", "more"]
    rows = [
        [result["settings"]["model"], name, *option_cells(result, name)]
        for result in results
        for name in result["results"]
        if name.startswith(_GPTQ) and _has_options(result["results"], name.split(",", maxsplit=1)[0])
    ]
    return "\n".join(markdown(heads, rows))


def _has_options(rows: Mapping[str, Any], own: str) -> bool:
    return own in rows and any(name.startswith(f"{own},") for name in rows)


def option_cells(result: dict[str, Any], name: str) -> list[str]:
    """Cells of the row of gptq under an option."""
    row, own = result["results"][name], result["results"][name.split(",", maxsplit=1)[0]]
    cells = [_bits(row)]
    for scores, more in zip((row, row["elsewhere"]), more_kl(result, name), strict=True):
        cells += [f"{scores['kl']:.4f}", _signed(None if row is own else more)]
    return cells


def more_kl(result: dict[str, Any], name: str) -> tuple[Difference | None, Difference | None]:
    """The KL that an option adds to gptq's, on the prose and elsewhere."""
    return kl_less(result, name, name.split(",", maxsplit=1)[0])


def kl_less(result: dict[str, Any], ours: str, other: str) -> tuple[Difference | None, Difference | None]:
    """A method's KL minus another's, on the prose and elsewhere, where both kept their windows."""
    row, others = result["results"][ours], result["results"][other]
    return _kl_less(row, others), _kl_less(row.get("elsewhere", {}), others.get("elsewhere", {}))


def _signed(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"


def _kl_less(row: dict[str, Any], other: dict[str, Any]) -> Difference | None:
    if "kl_by_window" not in row or "kl_by_window" not in other:
        return None
    differences = [a - b for a, b in zip(row["kl_by_window"], other["kl_by_window"], strict=True)]
    return mean_interval(differences, row["tokens_by_window"])


def _tiers(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["tier"] for row in result["results"].values() if "tier" in row))


def _leads(result: dict[str, Any], tier: str) -> list[list[str]]:
    rows = result["results"]
    ours = [name for name, row in rows.items() if row.get("tier") == tier and name in _LEADING]
    return [[result["settings"]["model"], tier, name, *lead_cells(result, name)] for name in ours if "kl" in rows[name]]


def lead_cells(result: dict[str, Any], ours: str) -> list[str]:
    """Cells of the row of one of our methods: the best other, and both differences."""
    best, *differences = lead(result, ours)
    return [best, *map(_signed, differences)]


def _bits(*rows: dict[str, Any]) -> str:
    """Bits of codes, scales and zeros, and of the tensors that hold them where they are wider; the span over models."""
    if "bits" not in rows[0]:
        return "-"
    bits, held = _span([row["bits"] for row in rows]), _span([row.get("held_bits", row["bits"]) for row in rows])
    return bits if held == bits else f"{bits}, held in {held}"


def _span(values: Sequence[float]) -> str:
    ends = (f"{value:.3f}".rstrip("0").rstrip(".") for value in (min(values), max(values)))
    return " to ".join(dict.fromkeys(ends))


def _scores(row: dict[str, Any], full: dict[str, Any]) -> list[str]:
    """Perplexity and KL on one text."""
    if "kl" not in row:
        return ["-", "-"]
    perplexity = f"{row['perplexity']:.3f}"
    if row is full:
        return [perplexity, f"{row['kl']:.4f}"]
    return [f"{perplexity} ({_growth(row, full)})" if "kl_by_window" in row else perplexity, _kl(row)]


def _kl(row: dict[str, Any]) -> str:
    """KL on one text with half of its interval, where windows were kept."""
    kl = f"{row['kl']:.4f}"
    if "kl_by_window" not in row:
        return kl
    interval = mean_interval(row["kl_by_window"], row["tokens_by_window"])
    return f"{kl} ± {interval.high - interval.mean:.4f}"


def _growth(row: dict[str, Any], full: dict[str, Any]) -> str:
    """Change of perplexity from 16 bits in percent, with the interval that its logarithm has."""
    differences = [a - b for a, b in zip(row["nll_by_window"], full["nll_by_window"], strict=True)]
    change = mean_interval(differences, row["tokens_by_window"])
    mean, low, high = (100 * math.expm1(nats) for nats in (change.mean, change.low, change.high))
    return f"{mean:+.2f} % [{low:+.2f}, {high:+.2f}]"


def _accuracy(row: dict[str, Any], full: dict[str, Any]) -> str:
    if not row.get("items"):
        return "-"
    correct, of_full = ([float(digit) for digit in each["correct"]] for each in (row, full))
    accuracy = f"{sum(correct) / len(correct):.1%}"
    if row is full:
        return accuracy
    change = paired_difference(correct, of_full)
    return f"{accuracy} ({100 * change.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}])"


def _is_timed(result: dict[str, Any]) -> bool:
    """Whether one kind of machine measured the time of all methods."""
    quantized = [row for name, row in result["results"].items() if name != FULL and "bits" in row]
    return len({row.get("device") for row in quantized}) == 1 and all("cpu_seconds" in row for row in quantized)


def _has_items(result: dict[str, Any]) -> bool:
    return any(row.get("items") for row in result["results"].values())
