"""The figures of research/pages/search.md, and those of docs/schemes.md that say what a search gains."""

import math
from functools import partial
from statistics import median

from diffquant.calib.search.result import SearchResult, read_search
from diffquant.calib.search.roles import roles
from diffquant.calib.search.table import uniform_kl
from research.check.numbers import About, Expected, ends
from research.check.page import RESULTS, Page
from research.check.pages.schemes import PAGE as GUIDE
from research.check.raw import raw
from research.studies.figure8_model import advantage
from research.studies.searched import SEARCHED, TEXTS, UNIFORM, gain, searched_cells

PAGE = Page("research/pages/search.md", guides=("What is measured", "How bits are chosen"))
W45, W55, C45, C55, C5 = (
    read_search(RESULTS / file)
    for file in (
        "smollm2-search/search-4.5-bits.json",
        "smollm2-search/search-5.5-bits.json",
        "smollm2-search-cache/search-4.5-bits.json",
        "smollm2-search-cache/search-5.5-bits.json",
        "smollm2-search-cache/with-5-bits/search-4.5-bits.json",
    )
)


_BUDGETS = {"4.5": (W45, C45), "5.5": (W55, C55), "4.5, of 8, 6, 5, 4": (C5, C5)}


def _searched_cell(row: str, column: str, at: int) -> list[Expected]:
    budget, _, name = row.rpartition(", ")
    each = next(each for each in _BUDGETS[budget][at].candidates if each.name == name)
    if column == "bits of the codes":
        return list(each.bits.values())
    values = {"checkpoint": each.nbytes / 1e6, "perplexity": each.perplexity, "KL": each.kl}
    return [{**values, "predicted KL": each.predicted}[column] or math.nan]


for _at, _section in enumerate(("SmolLM2-135M as DIFF V2", "K, V and logits of the same model")):
    PAGE.table(
        "budget, bits of the codes | recipe | bits of the codes | checkpoint | perplexity | KL | predicted KL",
        partial(_searched_cell, at=_at),
        section=_section,
        names=2,
    )
PAGE.says("The model has a perplexity of {} at 16 bits there", W45.perplexity)
PAGE.says("on which perplexity is {} at 16 bits", C45.perplexity)


def kl(result: SearchResult, name: str) -> float:
    return next(each.kl for each in result.candidates if each.name == name)


def below(searched: float, rival: float | None) -> float:
    """How far a KL lies below another, in percent."""
    if rival is None:
        raise LookupError("no KL of uniform bits")
    return 100 * (1 - searched / rival)


def against_uniform(result: SearchResult) -> float:
    return below(kl(result, "searched"), uniform_kl(result))


def against_even(result: SearchResult) -> float:
    return below(kl(result, "searched"), kl(result, "spread evenly"))


PAGE.says("KL is {} % below that of uniform bits of the same average at 4.5 bits", against_uniform(W45))
PAGE.says("(interpolated in log KL between 4 and 5 bits) and {} % below at 5.5", against_uniform(W55))
PAGE.says("spread evenly it is {} % and {} % below", against_even(W45), against_even(W55))
_PERPLEXITIES = {each.name: each.perplexity for each in W45.candidates}
PAGE.says(
    "at 4.5 bits {} against {} spread evenly, while uniform 5 bits, {} MB more, have {}",
    _PERPLEXITIES["searched"],
    _PERPLEXITIES["spread evenly"],
    (W45.candidates[3].nbytes - W45.candidates[0].nbytes) / 1e6,
    _PERPLEXITIES["uniform 5"],
)
_SUMS = [each.predicted / each.kl for result in (W45, W55) for each in result.candidates if each.predicted]
PAGE.says("the sum of single costs is {} to {} times what the whole recipe costs on other text.", *ends(_SUMS))
_CACHE_SUMS = [each.predicted / each.kl for result in (C45, C55, C5) for each in result.candidates if each.predicted]
PAGE.says("The sum of single costs is {} to {} times what the whole recipe costs", *ends(_CACHE_SUMS))

CHECK = raw("smollm2-search/check-16384.json")
_BITS = {"searched 4.5": 4.5, "searched 5.5": 5.5, "spread evenly 4.5": 4.5, "spread evenly 5.5": 5.49}


def _check(row: str, column: str) -> list[Expected]:
    kind, _, bits = row.rpartition(", ")
    name = "16 bits" if kind == "16 bits" else f"{kind} {ROUND.get(bits, bits)}"
    if column == "bits":
        return [float(bits)]
    entry = CHECK[name]
    return [{"checkpoint": entry["nbytes"] / 1e6, "perplexity": entry["perplexity"], "KL": entry["kl"]}[column]]


ROUND = {"4.00": "4", "4.50": "4.5", "5.00": "5", "5.49": "5.5", "5.50": "5.5", "6.00": "6"}
PAGE.table(" | bits | checkpoint | perplexity | KL", _check, names=2)


def _interpolated(bits: float) -> float:
    low, high = CHECK[f"uniform {math.floor(bits)}"]["kl"], CHECK[f"uniform {math.ceil(bits)}"]["kl"]
    return math.exp((math.log(low) + math.log(high)) / 2)


PAGE.says(
    "the searched recipes have {} % and {} % less KL there, against an even spread {} % and {} %",
    *(below(CHECK[f"searched {bits}"]["kl"], _interpolated(bits)) for bits in (4.5, 5.5)),
    *(below(CHECK[f"searched {bits}"]["kl"], CHECK[f"spread evenly {bits}"]["kl"]) for bits in (4.5, 5.5)),
)
PAGE.says(
    "at 4.5 bits {} against {} spread evenly.",
    CHECK["searched 4.5"]["perplexity"],
    CHECK["spread evenly 4.5"]["perplexity"],
)

# Units

_COSTS = sorted((unit.kl[4] for unit in W45.measurements), reverse=True)


def _share(costs: list[float]) -> float:
    return 100 * sum(costs) / sum(_COSTS)


def _of_kind(kind: str) -> list[float]:
    return [unit.kl[4] for unit in W45.measurements if unit.kind.endswith(kind)]


PAGE.says("five cause {} % and 21 cause {} %", _share(_COSTS[:5]), _share(_COSTS[:21]))
PAGE.says("with {} nats alone, {} % of the sum", _COSTS[0], _share(_COSTS[:1]))
PAGE.says("is {} times below", About(_COSTS[0] / _COSTS[-1], 0.1))
PAGE.says(
    "`down_proj` causes {} % of the sum and `v_proj` {} %", _share(_of_kind("down_proj")), _share(_of_kind("v_proj"))
)
PAGE.says("`q_proj` and `k_proj` cause {} % and {} %", _share(_of_kind("q_proj")), _share(_of_kind("k_proj")))


def _attention(kind: str) -> float:
    return 100 * median(unit.attention[4] or 0 for unit in W45.measurements if unit.kind.endswith(kind))


PAGE.says(
    "a 4-bit `v_proj` is {} % (median over layers), from a 4-bit `q_proj` or `k_proj` {} %",
    _attention("v_proj"),
    _attention("q_proj"),
)
PAGE.says(
    "by {} from 4 to 6 bits and {} from 6 to 8 (medians), where (31/7)² = {} and (127/31)² = {}",
    median(unit.kl[4] / unit.kl[6] for unit in W45.measurements),
    median(unit.kl[6] / unit.kl[8] for unit in W45.measurements),
    (31 / 7) ** 2,
    (127 / 31) ** 2,
)


def _chosen(result: SearchResult) -> list[int]:
    widths = [unit.chosen for unit in result.measurements]
    return [widths.count(bits) for bits in (4, 6, 8)]


PAGE.says(
    "At 4.5 bits {} tensors get 4 bits, {} get 6 and {} get 8; at 5.5 it is {}, {} and {}", *_chosen(W45), *_chosen(W55)
)

# By role

_SEARCHES = {
    name: read_search(RESULTS / f"search-roles/search-{name}.json")
    for name in ("prose-transformer", "prose-diff-v1", "prose-diff-v2")
}
_ROLES = {name: {role.kind.rpartition(".")[2]: role for role in roles(result)} for name, result in _SEARCHES.items()}


def _price(kind: str, model: str) -> float:
    """Thousandths of a nat that 4 bits cost a kind for each million bits saved; NaN where a model has none of it."""
    role = _ROLES[model].get(kind)
    return math.nan if role is None else 1000 * role.per_megabit(4)


def _dearest(model: str) -> list[str]:
    return sorted(_ROLES[model], key=lambda kind: -_price(kind, model))


def _signal_over_noise(projection: str, model: str) -> float:
    return _price(f"{projection}, signal", model) / _price(f"{projection}, noise", model)


PAGE.table(
    "4 bits a row | prose-transformer | prose-diff-v1 | prose-diff-v2",
    lambda kind, model: f"{_price(kind, model):.3g}" if kind in _ROLES[model] else "—",
)
PAGE.means(
    "noise queries pay least for a bit",
    all(_dearest(model)[-1] == "q_proj, noise" for model in ("prose-diff-v1", "prose-diff-v2")),
)
PAGE.says(
    "signal queries pay {} times as much in V1 and {} times in V2, and in V1 signal keys {} times",
    _signal_over_noise("q_proj", "prose-diff-v1"),
    _signal_over_noise("q_proj", "prose-diff-v2"),
    _signal_over_noise("k_proj", "prose-diff-v1"),
)
PAGE.means(
    "V1 pays most for `o_proj` and `v_proj`, behind and before its norm of each pair; V2 for `down_proj`, as the "
    "Transformer does",
    _dearest("prose-diff-v1")[:2] == ["o_proj", "v_proj"]
    and {_dearest(model)[0] for model in ("prose-diff-v2", "prose-transformer")} == {"down_proj"},
)
PAGE.means("is the second dearest", _dearest("prose-diff-v2")[1] == "lambda_proj")
PAGE.leaves("Costs are of 4 windows of 256 tokens", "a setting")

# Models trained here

POCKET = {name: raw(f"search-prose/{name}.json") for name in ("prose-transformer", "prose-diff-v1", "prose-diff-v2")}


def _searched(row: str) -> list[str]:
    name, _, uniform = row.partition(", ")
    return searched_cells(POCKET[name], uniform.removesuffix(" bits"))


PAGE.rows("model | uniform | bytes | searched, bytes | KL, nats | elsewhere: KL, nats", _searched, names=2)
_RUNS = [(name, width) for name, result in POCKET.items() for width in result["results"]]
GAINS = {
    (name, width, text): below(*(POCKET[name]["results"][width][which][text]["kl"] for which in (SEARCHED, UNIFORM)))
    for name, width in _RUNS
    for text in TEXTS
}
_V2 = [less for (name, *_), less in GAINS.items() if name == "prose-diff-v2"]
_OTHERS = [less for (name, *_), less in GAINS.items() if name != "prose-diff-v2"]
PAGE.says(
    "have {} to {} % less KL in the Transformer and V1, and {} to {} % less in V2",
    *ends(_OTHERS),
    *ends(_V2),
)
PAGE.means(
    "and as much less elsewhere as on prose",
    all(abs(GAINS[name, width, "prose"] - GAINS[name, width, "elsewhere"]) < 3 for name, width in _RUNS),
)
PAGE.means("No interval contains zero", all(gain(POCKET[name], width, text).high < 0 for name, width, text in GAINS))
_BYTES = [[POCKET[name]["results"][width][which]["bytes"] for which in (SEARCHED, UNIFORM)] for name, width in _RUNS]
PAGE.means("Files are as large as the uniform ones or smaller", all(ours <= plain for ours, plain in _BYTES))
PAGE.says("or smaller, by {} % at most", max(below(*sizes) for sizes in _BYTES))
_BITS_WON = [advantage(1 - less / 100, 1) for less in GAINS.values()]
_A_BIT_MORE = [
    below(*(result["results"][each][UNIFORM][text]["kl"] for each in (str(width + 1), str(width))))
    for result in POCKET.values()
    for width in (4, 5)
    for text in TEXTS
]
PAGE.says(
    "worth {} to {} bits of each weight: one bit more everywhere takes {} to {} % off KL",
    *ends(_BITS_WON),
    *ends(_A_BIT_MORE),
)
PAGE.means(
    "At 4 bits nothing but queries and keys gets 3",
    all(
        name.endswith(("q_proj", "k_proj"))
        for result in POCKET.values()
        for name, scheme in result["results"]["4"][SEARCHED]["recipe"]["overrides"].items()
        if scheme.startswith("3")
    ),
)
_SETTINGS = POCKET["prose-diff-v2"]["settings"]
PAGE.says("in float32, on {} characters in windows of {}", _SETTINGS["characters"], _SETTINGS["window"])
PAGE.leaves("with its 95 % interval", "a level")
_COUNTS = [len(POCKET["prose-diff-v2"]["results"]["4"][SEARCHED][text]["kl_by_window"]) for text in TEXTS]
PAGE.means("Student's over the 31 and 35 windows", _COUNTS == [31, 35])

# K, V and logits

PAGE.says("spread evenly by {} % and {} %", against_even(C45), against_even(C55))
PAGE.says(
    "but {} % less KL at 4.5 bits, and {} % less at 5.5, is what uniform bits",
    *(below(uniform_kl(result) or 0, kl(result, "searched")) for result in (C45, C55)),
)
PAGE.says(
    "KL is {} % below that of the search among 8, 6 and 4 bits, {} % below uniform bits and {} % below an even spread",
    below(kl(C5, "searched"), kl(C45, "searched")),
    against_uniform(C5),
    against_even(C5),
)
_PERPLEXITY5 = {each.name: each.perplexity for each in C5.candidates}
PAGE.says("whose perplexity is {} lower", _PERPLEXITY5["searched"] - _PERPLEXITY5["spread evenly"])
_CACHE_COSTS = {target: [u.kl[4] for u in C45.measurements if u.target == target] for target in ("k", "v", "logits")}
_ALL = sum(sum(costs) for costs in _CACHE_COSTS.values())
PAGE.says(
    "K causes {} %, logits {} % and V {} %",
    *(100 * sum(_CACHE_COSTS[target]) / _ALL for target in ("k", "logits", "v")),
)
PAGE.says(
    "the relative error after subtraction and norm is {} %, {} % and {} %",
    *(
        100 * median(u.attention[4] or 0 for u in C45.measurements if u.target == target)
        for target in ("k", "logits", "v")
    ),
)
PAGE.says("the costliest causes {} times the median KL", _COSTS[0] / median(_COSTS))
PAGE.says(
    "{} times for K, {} for V, {} for logits",
    *(max(_CACHE_COSTS[target]) / median(_CACHE_COSTS[target]) for target in ("k", "v", "logits")),
)
PAGE.says(
    "A cost falls {} times from 4 to 6 bits and {} times from 4 to 5",
    About(median(u.kl[4] / u.kl[6] for u in C5.measurements), 0.05),
    About(median(u.kl[4] / u.kl[5] for u in C5.measurements), 0.05),
)
PAGE.says(
    "cost {} times what 5 bits everywhere do",
    About(median((u.kl[4] + u.kl[6]) / 2 / u.kl[5] for u in C5.measurements), 0.05),
)
PAGE.says("4:g32\nstores {} bits", 4 + 16 / 32)
PAGE.says("`--budget 5` is {} here, and 6 is {}", 5 - 16 / 32, 6 - 16 / 32)
PAGE.says("a budget of {} here is {} of K and V and {} of logits", 4.5, 4.5 + 16 / 64, 4.5)

PAGE.leaves(
    "The files take 129.6 MB and 144.2 MB now, where uniform 4, 5 and 6 bits take 122.4, 136.9 and 151.4 MB",
    "arithmetic of shapes and widths: what `quantize --dry-run` says of the recipes beside the raw files",
)
PAGE.leaves("4,096 characters of the second half", "a setting")
PAGE.leaves("16,384 characters of the second half", "a setting")
PAGE.leaves("compared on 8,192 characters", "a setting")
PAGE.leaves("or evenly spread ones where 128 MB do not hold", "a limit of the code")
GUIDE.table(
    "stored bits of | prose-transformer | prose-diff-v1 | prose-diff-v2",
    lambda row, name: [GAINS[name, row[0], text] for text in TEXTS],
)
GUIDE.says("worth {} to {} bits of each weight", *ends(_BITS_WON))
GUIDE.leaves("models of 1.25 M parameters", "a count")
