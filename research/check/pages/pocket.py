"""The figures of diffquant/data/pocket/README.md."""

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import filterfalse, product
from statistics import fmean
from typing import Any

from diffquant.data import pocket_models
from diffquant.evals.defaults import SAMPLES
from diffquant.evals.protocols.needle import CITIES, DEPTHS, NUMBERS
from research.check.numbers import Expected, ends
from research.check.page import RESULTS, Page
from research.check.raw import measured, raw
from research.figure8.plan import FOLDER, Result, best_rate, results
from research.figure8.plan import KINDS as ENGLISH
from research.studies.results import read_json

PAGE = Page("diffquant/data/pocket/README.md")
KINDS = {"Transformer": "needle-transformer", "DIFF V1": "needle-diff-v1", "DIFF V2": "needle-diff-v2"}


def accuracy(folder: str, model: str, scheme: str, needles: int, target: str | None = None) -> float:
    score = measured(folder, model, scheme, f"needle:{needles}:1", target).score
    if score is None:
        raise LookupError(f"{folder}: no score")
    return score


def _by_length(row: str, column: str, folder: str) -> list[Expected]:
    kind, _, length = row.rpartition(", ")
    places = measured(folder, KINDS[kind], "16", f"needle:{column[-1]}:1").details["by_place"]
    return [fmean(place["accuracy"] for place in places if place["length"] == int(length))]


for section, folder in (
    ("What they retrieve", "pocket-needle-lengths"),
    ("Who learns to tell needles apart", "pocket-needle-first/lengths"),
):
    of_folder = partial(_by_length, folder=folder)
    PAGE.table("model | tokens | N = 1 | N = 2 | N = 4 | N = 6", of_folder, section=section, names=2)


def _have_equal_numbers(needles: int, lengths: Sequence[int], limit: int) -> list[bool]:
    """Of each context of items format 1, as the page's sweeps asked them, whether two of its cities had one number."""
    flags = []
    for sample, length, depth in product(range(SAMPLES), lengths, DEPTHS):
        rng = random.Random(f"0 {needles} 1 {length} {depth} {sample}")
        cities = rng.sample(CITIES, needles)
        flags.append(len({rng.choice(NUMBERS) for _ in cities}) < needles)
    return flags[:limit]


def _largest_change() -> float:
    """By how much a share of the page's sweeps differs at most without contexts in which two numbers were equal."""
    changes = []
    for folder in _SWEEPS:
        sweep = read_json(RESULTS / folder / "sweep.json")
        tasks = {task["name"]: task for task in sweep["settings"]["tasks"]}
        for cell in sweep["cells"]:
            task, values = tasks[cell["task"]], cell["result"]["values"]
            flags = _have_equal_numbers(int(cell["task"].split(":")[1]), task["lengths"], task["limit"])
            others = [value for value, has in zip(values, flags, strict=True) if not has]
            changes.append(abs(sum(others) / len(others) - sum(values) / len(values)))
    return max(changes)


_SWEEPS = (
    "pocket-needle",
    "pocket-needle-first/lengths",
    "pocket-needle-first/logits",
    "pocket-needle-lengths",
    "pocket-needle-seed-1",
    "pocket-needle-weights-kv",
)
PAGE.says(
    "at 256 tokens {} of 100 contexts at N = 2 had such a pair, {} at N = 4 and {} at N = 6",
    *(sum(_have_equal_numbers(needles, [256], 100)) for needles in (2, 4, 6)),
)
PAGE.says("no share that these sweeps hold differs by more than {}", _largest_change())

_HEADS = "Transformer, N = 1 | N = 4 | DIFF V1, N = 1 | N = 4 | DIFF V2, N = 1 | N = 4"


def _retrieved(row: str, folder: str) -> list[list[float]]:
    target, _, scheme = row.rpartition(" ")
    return [[accuracy(folder, kind, scheme, needles, target or None)] for kind in KINDS.values() for needles in (1, 4)]


PAGE.rows(f"logits | {_HEADS}", partial(_retrieved, folder="pocket-needle"))
PAGE.rows(f" | {_HEADS}", partial(_retrieved, folder="pocket-needle-weights-kv"))
_SEEDS = ("pocket-needle", "pocket-needle-seed-1")
PAGE.rows(
    "logits | Transformer, 0 | 1 | DIFF V1, 0 | 1 | DIFF V2, 0 | 1",
    lambda row: [[accuracy(folder, kind, row, 4)] for kind in KINDS.values() for folder in _SEEDS],
)


def _largest(file: str) -> list[float]:
    by_name = {model["generation"]: model["overall"]["logits"]["top"]["1"] for model in raw(file)["models"]}
    return [by_name[kind] for kind in KINDS]


PAGE.says(
    "on prose they are {}, {} and {} (Transformer, V1, V2) with seed 0 and {}, {} and {} with seed 1",
    *_largest("pocket-needle-outliers/outliers.json"),
    *_largest("pocket-needle-seed-1/outliers.json"),
)

# English

RUNS = {name: results()[f"e1-{kind}-seed-101"] for name, kind in zip(KINDS, ENGLISH, strict=True)}
_FOLDERS = dict(zip(KINDS, pocket_models("prose"), strict=True))
SHIPPED = {name: json.loads((folder / "training.json").read_text()) for name, folder in _FOLDERS.items()}
# Of a model that ships, and of the raw file of its run, whose scores are by passage.
_SCORED: dict[str, tuple[Callable[[Result], float], Callable[[Result], float]]] = {
    "perplexity of held-out text": (lambda each: each["validation"]["perplexity"],) * 2,
    "perplexity of 16 passages of other books": (
        lambda ours: math.exp(ours["books"]["nll"]),
        lambda run: math.exp(fmean(run["books"]["nll"])),
    ),
    **{
        f"KL of logits {scheme}, nats": (
            lambda ours, scheme=scheme: ours["books"]["kl"][scheme],
            lambda run, scheme=scheme: fmean(run["books"]["kl"][scheme]),
        )
        for scheme in ("4:tensor", "4:row:shift")
    },
}


def _of_a_training(row: str, head: str) -> list[Expected]:
    ours, theirs = _SCORED[row]
    return [ours(SHIPPED[head]), theirs(RUNS[head])]


PAGE.table("one training of each kind | Transformer | DIFF V1 | DIFF V2", _of_a_training)
_SAME = [name for name in KINDS if SHIPPED[name]["weights"] == RUNS[name]["weights"]]
PAGE.means("The Transformer's weights are its run's, to the bit", _SAME == ["Transformer"])


def _furthest(name: str) -> float:
    """Largest difference of a loss in the log of a model that ships from that of its run's raw file."""
    logged = [json.loads(line) for line in (_FOLDERS[name] / "log.jsonl").read_text().splitlines()]
    return max(abs(each["loss"] - RUNS[name]["losses"][str(each["step"])]) for each in logged)


PAGE.says("by {} in V1 and {} in V2 at most", *map(_furthest, ("DIFF V1", "DIFF V2")))
_OURS, _THEIRS = _SCORED["KL of logits 4:tensor, nats"]
PAGE.says(
    "V1's KL of logits `4:tensor` is {} % above its run's",
    100 * (_OURS(SHIPPED["DIFF V1"]) / _THEIRS(RUNS["DIFF V1"]) - 1),
)
PAGE.means("All three do best at 4e-3", {best_rate(kind, results()) for kind in ENGLISH} == {4e-3})
PAGE.means("116 Standard Ebooks editions", len((FOLDER / "books.txt").read_text().splitlines()) == 116)


def _of_one_rate(row: str, head: str) -> list[Expected] | str:
    """Fingerprints in a raw file after and before the models shipped, and their perplexity."""
    if row == "fingerprint":
        return f"`{raw(f'figure8-passages/{head}.json')['fingerprint'][:12]}`"
    if row == "before they shipped":
        return f"`{raw(f'figure8-prose-kl/{head}.json')['fingerprint'][:12]}`"
    return [raw(f"rounding/{head}.json")["results"]["16 bits"]["perplexity"]]


PAGE.table(" | prose-transformer | prose-diff-v1 | prose-diff-v2", _of_one_rate)
_AFTER, _BEFORE = (
    measured(f"figure8-prose-stored{end}", "prose-diff-v1", "16").details["perplexity"] for end in ("-g32", "")
)
PAGE.means("perplexities of DIFF V1 differ by less than a ten-millionth", abs(_AFTER / _BEFORE - 1) < 1e-7)
_WIDE = [cell["result"]["score"] for cell in raw("pocket-needle/sweep.json")["cells"] if cell["bits"] in (16, 8, 6)]
PAGE.says("At 16, 8 and 6 bits every model retrieves {} or more at every granularity", min(_WIDE))
_STORED = [
    cell["result"]["score"] for cell in raw("pocket-needle-weights-kv/sweep.json")["cells"] if cell["bits"] in (8, 6, 4)
]
PAGE.says("At 8, 6 and 4 bits every model retrieves {} or more", min(_STORED))
PAGE.leaves("DIFF V2 of 0.15 M parameters (counts within 1 %)", "counts")
PAGE.leaves("have 1.25 M parameters (counts within 1 %)", "counts")
PAGE.leaves("6.7 M tokens", "how they were trained")
PAGE.leaves("the same 7.4 M tokens", "how they were trained")
PAGE.leaves(
    "A 95 % interval is at most 10 points to either side, and of 100 in 100 it reaches down to 96 %", "binomial"
)
PAGE.leaves("byte-level BPE of 2,048 tokens", "a size")
PAGE.leaves("It had 2,600 steps of 2,048 tokens", "how they were trained")
PAGE.leaves("4,500 steps, then to cities that join one after another and 6,500 steps", "how they were trained")
_FIRST = {name: accuracy("pocket-needle-first/logits", kind, "3:tensor", 1) for name, kind in KINDS.items()}
PAGE.says("V2 kept {}, the Transformer {} and", _FIRST["DIFF V2"], _FIRST["Transformer"])
PAGE.means("and V1 nothing", _FIRST["DIFF V1"] == 0)

# Steps until they retrieve

_RUNS = [read_json(file) for file in sorted((RESULTS / "steps-until-solved").glob("*/retrieved.json"))]
_KINDS = {
    "Transformer": "transformer",
    "DIFF V1": "diff-v1",
    "DIFF V2": "diff-v2",
    "control: half the heads": "half-heads",
    "control: half the heads, V1's norm": "half-heads-norm",
}


def _is_solved(run: dict[str, Any]) -> bool:
    return None not in run["solved"].values()


def _steps(row: str) -> list[Sequence[Expected]]:
    runs = [run for run in _RUNS if run["kind"] == _KINDS[row]]
    solved, unsolved = list(filter(_is_solved, runs)), list(filterfalse(_is_solved, runs))
    later = [each["retrieved"] for run in unsolved for each in run["evaluations"] if each["step"] >= 100]
    return [
        [len(runs)],
        [len(solved), *(max(run["solved"].values()) for run in solved)],
        sorted(run["evaluations"][-1]["step"] for run in unsolved),
        *(ends(each[needles] for each in later) for needles in "24"),
    ]


PAGE.rows("kind | seeds | solved | the others, unsolved, were followed for | and name, N = 2 | N = 4", _steps)
PAGE.means("V1 with seed 0, the one of the table", [run["seed"] for run in _RUNS if _is_solved(run)] == [0])
PAGE.leaves("until it names 95 %", "a setting")

_AT_4_TENSOR, _AT_3_ROW = (
    [accuracy("pocket-needle", kind, scheme, 4) for kind in KINDS.values()] for scheme in ("4:tensor", "3:row")
)
PAGE.means(
    "the Transformer keeps all, V1 little more than half and V2 a third",
    _AT_4_TENSOR[0] > 0.98 and 0.5 < _AT_4_TENSOR[1] < 0.6 and 0.28 < _AT_4_TENSOR[2] < 0.36,
)
PAGE.means(
    "at 3 bits a row the Transformer keeps nearly all and the DIFF models about a third or less",
    _AT_3_ROW[0] > 0.9 and max(_AT_3_ROW[1:]) < 0.36,
)
