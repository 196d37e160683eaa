"""The figures of CHANGELOG.md."""

from research.check.page import Page
from research.check.pages.figure8 import VERDICTS
from research.check.pages.kernels import OUTCOMES
from research.check.pages.rounding import CHANCE, SHARES, SHIPPED
from research.check.raw import medians, raw

PAGE = Page("CHANGELOG.md", is_guide=True)

PAGE.means(
    "On the English DIFF V1 `tuned` has less KL than AutoRound at 4.5, 4.12 and 3.5 bits, on DIFF V2 mostly, and is "
    "level with it on the Transformer",
    [sum(share < -CHANCE for (name, *_), share in SHARES.items() if name == model) for model in SHIPPED] == [1, 6, 3],
)
PAGE.leaves("less KL than AutoRound at 4.5, 4.12 and 3.5 bits", "sizes")
PAGE.leaves("Motif-2.6B and -2-12.7B", "names of models")
PAGE.leaves("ONNX Runtime from 1.18 on", "a version, which make test-readers holds")
PAGE.leaves("whose KL stays below 0.05 nats", "a choice of the page")
PAGE.means(
    "more than ten times as fast as by transformers' loader",
    medians(raw("opening.json")["transformers"], "seconds") > 10 * medians(raw("opening.json")["ours"], "seconds"),
)
PAGE.leaves("at 1.25 million parameters", "a size")
PAGE.means("parameters DIFF loses more by low-bit logits", {*VERDICTS.values()} == {"DIFF loses"})
PAGE.says(
    "One H100 has run them: {} of {} tests passed, {} were skipped",
    OUTCOMES["passed"],
    sum(OUTCOMES.values()),
    OUTCOMES["skipped"],
)
