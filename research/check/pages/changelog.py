"""The figures of CHANGELOG.md."""

from research.check.page import Page
from research.check.pages.figure8 import LONGER_WON, VERDICTS
from research.check.pages.figure8_larger_words import LARGER_WON
from research.check.pages.figure8_ratios_words import SENSITIVITY, WON_AT_PAPERS
from research.check.pages.kernels import OUTCOMES
from research.check.pages.rounding import CHANCE, REPEATED_LEADS, SHARES
from research.check.raw import medians, raw

PAGE = Page("CHANGELOG.md", is_guide=True)

PAGE.means(
    "On the English DIFF V1 `tuned` has less KL than AutoRound at 4.5, 4.12 and 3.5 bits; on DIFF V2 and the "
    "Transformer, too, at 4.5 bits, over five seeds of each",
    all(share < -CHANCE for (name, *_), share in SHARES.items() if name == "DIFF V1")
    and all(lead.low > 0 for lead in REPEATED_LEADS),
)
PAGE.leaves("less KL than AutoRound at 4.5, 4.12 and 3.5 bits", "sizes")
PAGE.leaves("too, at 4.5 bits, over five seeds", "a size")
PAGE.leaves("Motif-2.6B and -2-12.7B", "names of models")
PAGE.leaves("ONNX Runtime from 1.18 on", "a version, which make test-readers holds")
PAGE.leaves("`cache` since its 5.24", "a version")
PAGE.leaves("on by default since its 1.29", "a version")
PAGE.leaves("whose KL stays below 0.05 nats", "a choice of the page")
PAGE.means(
    "more than ten times as fast as by transformers' loader",
    medians(raw("opening.json")["transformers"], "seconds") > 10 * medians(raw("opening.json")["ours"], "seconds"),
)
PAGE.leaves("at 1.25 million parameters", "a size")
PAGE.means("parameters DIFF loses more by low-bit logits", {*VERDICTS.values()} == {"DIFF loses"})
PAGE.means(
    "Neither three times\n  the tokens nor four times the parameters change the sign",
    all(won[0] < 0 for won in (*LONGER_WON.values(), *LARGER_WON.values())),
)
PAGE.means("At equal steps it costs DIFF about half a bit", all(0.35 < more[0] < 0.75 for more in SENSITIVITY.values()))
PAGE.means("the same\n  models win more than two", WON_AT_PAPERS[0] > 2)
PAGE.says(
    "One H100 has run them: {} of {} tests passed, {} were skipped",
    OUTCOMES["passed"],
    sum(OUTCOMES.values()),
    OUTCOMES["skipped"],
)

PAGE.leaves("vLLM before 0.18", "a version")
