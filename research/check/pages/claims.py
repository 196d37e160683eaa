"""The figures of research/pages/claims.md, each computed as on the page that it is of."""

from research.check.numbers import ends
from research.check.page import Page, Unmeasured
from research.check.pages import figure8_one_rate as one_rate
from research.check.pages import kv, rounding, search
from research.check.pages.figure8 import LONGER_MORE, control, largest
from research.check.pages.figure8_larger_words import LARGER_MORE
from research.check.pages.figure8_ratios_words import LEVEL_ENDS, SENSITIVITY, WON_AT_PAPERS
from research.check.pages.figure8_seeds import CERTAIN, HOLM
from research.check.pages.kernels import AIMS, OUTCOMES
from research.check.raw import committed, raw

PAGE = Page("research/pages/claims.md")
for section in ("Quantized models", "When DIFF attention loses less by low bits", "Speed and memory"):
    heads = "claim | n, interval | raw file | made by | refuted by"
    PAGE.table(heads, Unmeasured("how much was measured"), section=section)
PAGE.says(
    "With 5.3 M parameters V1 needs {} [{}, {}] bits of logits more than a Transformer, and V2 {} [{}, {}]",
    *(x for more in LARGER_MORE.values() for x in more),
)
PAGE.says(
    "At equal steps DIFF V1 needs {} [{}, {}] bits of logits more than a Transformer, and V2 {} [{}, {}]",
    *(x for more in SENSITIVITY.values() for x in more),
)
PAGE.says("would lose {} to {} bits to the DIFF models of three sizes", *WON_AT_PAPERS)
PAGE.says("from {} to {} times on it loses", *LEVEL_ENDS)
PAGE.says(
    "V1's interval over three trainings, {} to {} bits, misses zero by {}",
    *(-control("DIFF V1, equal ranges", "bits won at `4:tensor`")[at] for at in (2, 1, 2)),
)
PAGE.leaves("at most 5.3 M parameters that were trained here (1.3 M but for", "counts")
PAGE.says(
    "With three times the tokens V1 needs {} [{}, {}] bits of logits more than a Transformer, and V2 {} [{}, {}]",
    *(x for more in LONGER_MORE.values() for x in more),
)
_MUTANTS = raw("mutants.json")["groups"]
_LATER = ("report", "cache", "calib", "graph", "verification", "sweep", "cli")
_GROUPS = [_MUTANTS[name] for name in ("numerics", "attention", "checkpoint", "stats")]
PAGE.says(
    "of {} in the numerics, attention, the statistics and the rooms of checkpoints {} make a test fail",
    sum(group["planted"] for group in _GROUPS),
    sum(group["killed"] for group in _GROUPS),
)
PAGE.says(
    "In the reports {} of {} do, in the caches {} of {}, in calibration {} of {}, in exported graphs {} of {}, "
    "in `verify` {} of {}, in sweeps {} of {}, in the command line {} of {}",
    *(_MUTANTS[name][count] for name in _LATER for count in ("killed", "planted")),
)
PAGE.says("of the other {} the file says why", sum(len(group["survivors"]) for group in _GROUPS))

# Rounding

_INTERVALS = rounding.AGAINST_TUNER.values()
PAGE.says(
    "of the {} intervals over windows {} lie below zero, one above",
    len(_INTERVALS),
    sum(each.high < 0 for each in _INTERVALS),
)
PAGE.means("lie below zero, one above", sum(each.low > 0 for each in _INTERVALS) == 1)
_AHEAD = {
    model: sum(share < -rounding.CHANCE for (name, *_), share in rounding.SHARES.items() if name == model)
    for model in rounding.SHIPPED
}
PAGE.means(
    "on both texts, by more than AutoRound's reruns differ; on DIFF V2 by more in three of six places, on the "
    "Transformer in one",
    _AHEAD == {"DIFF V1": 6, "DIFF V2": 3, "Transformer": 1},
)
PAGE.says(
    "with {} to {} % less at 4.5 bits than the best that reads no text on prose and {} to {} % less on HellaSwag's "
    "contexts",
    *rounding.AGAINST_BLIND,
)
PAGE.means(
    "five seeds of each at 4.5 bits, on one processor, leave `tuned` ahead on all three models",
    all(lead.low > 0 for lead in rounding.REPEATED_LEADS),
)
PAGE.says("AutoRound's KL in {} reruns differs by {} %", len(rounding.RERUNS), 100 * rounding.RERUN)
PAGE.means(
    "over four passages of prose the intervals lie below zero on DIFF V1 at all sizes, on DIFF V2 at one, on the "
    "Transformer at none",
    [sum(rounding.by_passage(model, size).high < 0 for size in rounding.TUNERS) for model in rounding.SHIPPED]
    == [0, 3, 1],
)

# Caches, search

_ROTATED = [less for bits in (4, 3) for text in kv.TEXTS for less in kv.less(bits, text)]
PAGE.says("lower DIFF V1's KL by {} to {} % at 4 and 3 bits of the cache", *ends(_ROTATED))
PAGE.means(
    "In windows of 256, 512 and 1,024 tokens the preset `kv-4bit-best` has the lowest KL of those caches measured that "
    "would take at most three tenths of 16 bits in 4,096 tokens; in windows of 4,096 tokens it cannot be told from the "
    "same without rotation",
    kv.BEST_IN_WINDOWS and kv.BEST_OF_MIDDLE and kv.LONG_LEVEL,
)
_SEARCHED = search.GAINS.values()
PAGE.says("searched widths have {} to {} % less KL", *ends(_SEARCHED))
PAGE.leaves("At the stored bits of 4, 5 or 6 bits everywhere", "sizes")

# DIFF

PAGE.says(
    "V1 at twice the learning rate loses fewer bits in all {} schemes, less than half as many in {}",
    len(one_rate.REMAINS),
    sum(share < 0.5 for share in one_rate.REMAINS.values()),
)
PAGE.says(
    "in five, all at 3 bits, {} to {} % of the loss remains",
    *ends(100 * share for share in one_rate.REMAINS.values() if share > 0.5),
)
PAGE.means("in five, all at 3 bits", [s[0] for s, share in one_rate.REMAINS.items() if share > 0.5] == ["3"] * 5)
PAGE.means(
    "Of 14 intervals over trainings 13 miss zero, and by Holm's correction four: V1's loss under `4:tensor`, `4:head` "
    "and `4:row:shift`, V2's under `4:row:shift`",
    len(CERTAIN) == 13 and {"V1, 4:tensor", "V1, 4:head", "V1, 4:row:shift", "V2, 4:row:shift"} == HOLM,
)
PAGE.means(
    "none of its three intervals over trainings stays above zero under Holm's correction",
    not [each for each in HOLM if each.endswith("alike")],
)
PAGE.means(
    "DIFF V1 in all cells of one training, and in another it raises five of 12, lowers five and leaves two",
    one_rate.directions("diff-v1", one_rate.FIRST)[0] == 12
    and one_rate.directions("diff-v1", one_rate.SECOND) == (5, 5, 2),
)
PAGE.means(
    "On retrieval `alike` helps DIFF V2 in most cells",
    all(one_rate.directions("diff-v2", folders)[0] > 6 for folders in (one_rate.FIRST, one_rate.SECOND)),
)

PAGE.says(
    "twice as wide, has {} [{}, {}] of the other's perplexity", *one_rate.ratio("Transformer with half the heads")
)

_BELOW = [
    sum(ours < plain for ours, plain in zip(largest(kind, what), largest("transformer", what), strict=True))
    for what in ("largest hidden state", "largest logit")
    for kind in ("diff-v2", "diff-v1")
]
PAGE.means(
    "V2's largest hidden state is below the Transformer's in six and V1's in four, V2's largest logit in four and "
    "V1's in three",
    _BELOW == [6, 4, 4, 3],
)

# Speed

_DEFAULT = [
    raw(f"quantize-default/{name}.json")["roundings"]
    for name in ("prose-diff-v1", "smollm2-135m-diff-v2", "SmolLM2-135M-Instruct.Q4_1")
]
_SLOWER = [runs["mse"]["cpu_seconds"] / runs["nearest"]["cpu_seconds"] for runs in _DEFAULT]
PAGE.says("takes {} to {} times the processor time of `nearest`", *ends(_SLOWER))
_SERVED = raw("serve-bench.json")["aims"]
PAGE.means(
    "gives more than three times the tokens per second with 32 requests that it gives with one",
    all(aim["measured"] > 3 for aim in _SERVED if aim["what"].endswith("32 requests / 1")),
)
_BESIDE_BATCHES = {
    other: [aim["measured"] for aim in _SERVED if aim["what"].endswith(f"served / {other}")]
    for other in ("diffquant generate", "transformers generate_batch")
}
PAGE.means(
    "more than `generate_batch` gives with one batch of 32", min(_BESIDE_BATCHES["transformers generate_batch"]) > 1
)
_BESIDE_OWN = _BESIDE_BATCHES["diffquant generate"]
PAGE.says("{} to {} of what `diffquant generate` gives with one", *ends(_BESIDE_OWN))
_BUSY = raw("serve-bench-busy.json")["aims"]
PAGE.means(
    "on busy cores fewer than either",
    all(aim["measured"] < 1 for aim in _BUSY if "32 requests: served / " in aim["what"]),
)
PAGE.says("of its decode rate ({} of a DiffLlama's)", raw("motif-decode.json")["motif_of_diffllama"])

# Raw files

PAGE.says(
    "On an H100 {} of the {} measured ratios", AIMS.count("reached"), AIMS.count("reached") + AIMS.count("missed")
)
PAGE.says("all {} tests on one H100, of which {} failed in the last run", sum(OUTCOMES.values()), OUTCOMES["failed"])
PAGE.leaves("Triton 3.6, torch 2.11, one shape a row", "versions")
PAGE.leaves("as carried at 3.4 bits a weight", "arithmetic of bench/gpu/carried.py")
PAGE.leaves("400 items, paired, one run", "what was asked for")
_SWEEPS = {name.rpartition("/")[0]: raw(name) for name in committed("sweep.json")}
_WITH_CODE = {name for name, sweep in _SWEEPS.items() if any(cell.get("code") for cell in sweep["cells"])}
PAGE.says(
    "Of the {} committed sweeps {} name no commit",
    len(_SWEEPS),
    len(_SWEEPS) - len(_WITH_CODE),
)
PAGE.means(
    "Of the 22 committed sweeps six have them: `research/results/figure8-needle-alike-seed-1/`, "
    "`research/results/figure8-qk/`, `research/results/pocket-nll/`, `research/results/smollm2-logits-h100/`, "
    "`research/results/smollm2-logits-kl/` and `research/results/smollm2-margins/`",
    {
        "figure8-needle-alike-seed-1",
        "figure8-qk",
        "pocket-nll",
        "smollm2-logits-h100",
        "smollm2-logits-kl",
        "smollm2-margins",
    }
    == _WITH_CODE,
)
PAGE.leaves("about 3,240 figures of tables", "an audit's count, whose programs are not in this repository")
PAGE.leaves("3,465 statistics against scipy", "an audit's count, whose programs are not in this repository")
