"""The counts of docs/reliability.md, which the programs it names print; no result of a model is among them."""

from research.check.page import Page, Unmeasured
from research.check.raw import raw

PAGE = Page("docs/reliability.md")
_HEADS = "program | commit | tried | came back, or were refused in a line or read rightly"
_PRINTED = Unmeasured("printed by the page's commands at the commit named")
PAGE.table(_HEADS, _PRINTED, names=2)
PAGE.table("checkpoint | commit | scheme | memory beyond mapped files", _PRINTED, names=3)
PAGE.leaves("more than ten seconds", "a setting of the programs")
PAGE.leaves("may not reach 1 GB", "a setting of the program")
PAGE.leaves("154 MB are the imports", "printed by bench.programs.quantize")
PAGE.leaves("40 GB at `4:tensor`", "what was not run")

_MUTANTS = raw("mutants.json")["groups"]


def _planted(group: str, head: str) -> str:
    of_group = _MUTANTS[group]
    sampled = of_group["runs"][0]["environment"]
    return {
        "commit of the sample": sampled["commit"][:7],
        "date": sampled["date"],
        "planted, of all places": f"{of_group['planted']} of {of_group['possible']:,}",
        "make a test fail": str(of_group["killed"]),
    }[head]


PAGE.table("group | commit of the sample | date | planted, of all places | make a test fail", _planted)
