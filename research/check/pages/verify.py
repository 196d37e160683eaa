"""The figures of docs/verify.md, and the faults that it lists."""

import ast
from pathlib import Path

from diffquant.data import pocket_models
from research.check.page import ROOT, Page
from research.check.raw import raw, recorded

PAGE = Page("docs/verify.md")
PAGE.shows("diffquant verify", lambda: recorded("diffquant verify"))


def _names_in(file: Path) -> dict[str, list[str]]:
    """Keys of a file's dictionaries, which needs onnx where it is imported."""
    assignments = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
    return {
        ast.unparse(each.targets[0]): [key.value for key in each.value.keys if isinstance(key, ast.Constant)]
        for each in assignments
        if isinstance(each.value, ast.Dict)
    }


_TESTED = _names_in(ROOT / "tests/export/test_planted_faults.py")
_BODY = [name for name in _TESTED["FAULTS"] if "body: " in name]
_GRAPH = [name for name in _TESTED["FAULTS"] if name not in _BODY]
_WEIGHTS, _ARITHMETIC = _GRAPH.index("scales x 1.05"), _GRAPH.index("another λ in V1")
FAULTS = {
    "the cache": _GRAPH[:_WEIGHTS],
    "weights": _GRAPH[_WEIGHTS:_ARITHMETIC],
    "arithmetic": _GRAPH[_ARITHMETIC:],
    "the function body": [name.partition("body: ")[2] for name in _BODY],
    "the native kernel": _TESTED["NATIVE"],
}
PAGE.table("in | faults", lambda row, _: "; ".join(FAULTS[row]))
PAGE.says("none of {} sound exports", len(_TESTED["SOUND"]) + len(pocket_models("prose")))
_TRAINED = raw("planted-faults.json")["results"]
PAGE.means(
    "`verify` refuses all four and passes the export as it is",
    len(_TRAINED) == 5 and all(each["refused"] == (name != "none") for name, each in _TRAINED.items()),
)
_COST = raw("verify.json")
_TURN = _COST["turns"][0]
PAGE.says(
    "took {} CPU seconds on two cores, {} of them measuring what rounding explains, and {} seconds\nof the clock",
    _TURN["cpu_seconds"],
    sum(part["cpu_seconds"] for part in _TURN["parts"] if part["part"].endswith("what rounding explains")),
    _TURN["seconds"],
)
PAGE.leaves("scales x 1.05; swapped query pairs) were", "the size of a fault")
PAGE.leaves("with its 95 % interval", "a level")
PAGE.leaves("255, 300, 1,023, four times as many and so on", "a setting, which tests/export/test_verification.py holds")
PAGE.leaves("take more than 256 MiB", "a setting")
PAGE.leaves("those are the rows beyond 65,536", "arithmetic")
PAGE.leaves("one sequence of up to 1,024 tokens", "a setting")
PAGE.leaves("from it by more than 1 %", "a limit, which tests/export/test_verification.py holds")
