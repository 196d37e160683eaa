"""The figures of CHANGELOG.md."""

from tests.docs.page import Page
from tests.docs.pages.rounding import FIRST
from tests.docs.raw import raw

PAGE = Page("CHANGELOG.md")

PAGE.says(
    "in {} of {} combinations of a model and a size, `mse` in {}",
    sum(first["gptq"] for first in FIRST),
    len(FIRST),
    sum(first["mse"] for first in FIRST),
)
PAGE.means("more than ten times as fast as by transformers' loader", raw("opening.json")["ratio"] > 10)
PAGE.leaves(
    "off by up to 0.66 of a weight at 3 bits",
    "found with a script that was not kept; no committed result has such logits",
)
