"""The figures of README.md."""

import re

from research.check.page import ROOT, Page, Unmeasured
from research.check.pages import kv
from research.check.pages.figure8 import REMAINS
from research.check.pages.figure8_seeds import SEEDS
from research.check.pages.rounding import CHANCE, SHARES, SHIPPED, SMOLLM2
from research.check.pages.verify import PAGE as VERIFY
from research.check.raw import measured, raw, recorded
from research.studies.figure8_seeds import bits_won

PAGE = Page("README.md")
for verb in ("convert", "quantize", "generate", "export", "run"):
    PAGE.shows(f"diffquant {verb}", lambda verb=verb: recorded(f"diffquant {verb}"))
_GENERATION = raw("generate.json")["models"]["smollm2-135m-diff-v2"]["export 4:g32 kv 8 embed 8"]
PAGE.says(
    "this 4-bit export generated {} tokens per second, {} times as many as torch in float32",
    _GENERATION["decode_median"],
    _GENERATION["decode_of_torch"],
)
PAGE.says(
    "One DIFF V1 trained at twice the learning rate lost less than half as many bits in {} of {} schemes",
    sum(share < 0.5 for share in REMAINS.values()),
    len(REMAINS),
)
PAGE.means(
    "and more than half as many in the other five, all at 3 bits",
    [scheme[0] for scheme, share in REMAINS.items() if share > 0.5] == ["3"] * 5,
)
_KL = {
    scheme: measured("smollm2-logits-kl", "SmolLM2-135M-Instruct.Q4_1.gguf", scheme).details["kl"]
    for scheme in ("6:tensor", "4:tensor:shift")
}
PAGE.means("4 bits with `shift` lose less than 6 without it", _KL["4:tensor:shift"] < _KL["6:tensor"])
PAGE.means(
    "On two of the three models trained here they lose more",
    sum(
        measured("figure8-prose", f"prose-{kind}", "4:tensor:shift").details["kl"]
        > measured("figure8-prose", f"prose-{kind}", "6:tensor").details["kl"]
        for kind in ("transformer", "diff-v1", "diff-v2")
    )
    == 2,
)
PAGE.means(
    "in each of four trainings, DIFF lost more than the Transformer when rounded as the paper rounds",
    len(SEEDS) == 4
    and all(bits_won(seed, f"DIFF {name}", "4:tensor") < 0 for seed in SEEDS.values() for name in ("V1", "V2")),
)
PAGE.means(
    "less than AutoRound on small DIFF models, level with it on their plain Transformer",
    all(share < 0 for (model, *_), share in SHARES.items() if model != "Transformer")
    and sum(abs(share) < CHANCE for (model, *_), share in SHARES.items() if model == "Transformer") == 5,
)
PAGE.means(
    "`gptq` takes less than half the time",
    all(
        rows[f"gptq {size}"]["cpu_seconds"] < rows[f"tuned {size}"]["cpu_seconds"] / 2
        for rows in (result["results"] for result in (SMOLLM2, *SHIPPED.values()))
        for size in ("4:g32", "4:g128", "6:g128", "3:g32")
    ),
)
PAGE.means("In short windows it has the lowest KL of the caches of its size that were measured", kv.BEST_IN_WINDOWS)
PAGE.means("in 4,096 tokens nothing tells it from the same without rotation", kv.LONG_LEVEL)
PAGE.says("`--weights 4:g32`, {} stored bits", 4 + 16 / 32)
PAGE.means(
    "layer by layer, by seven routes",
    len(re.findall(r'yield "', (ROOT / "export/verification/routes.py").read_text(encoding="utf-8"))) + 2 == 7
    and sum(len(table.rows) for table in VERIFY.document().tables if table.heads[0] == "route") == 7,
)
PAGE.leaves("its paired 95 % interval", "a level of confidence")
PAGE.leaves("tested on Linux with Python 3.11", "a version")
PAGE.table("for | take | why", lambda *_: Unmeasured("options, and what their schemes store"))
PAGE.table("page | what it has", lambda *_: Unmeasured("contents"))
