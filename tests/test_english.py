"""Counts of unclear names and docstrings only fall, and guides have no unclear phrases.

`python -m tests.test_english` prints tests/english.csv.
"""

import ast
import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.counts import HOUSE, PRODUCT, files

TABLE = Path(__file__).with_name("english.csv")
# "or None if ..." names the case in a sentence.
NONE = re.compile(r"(?<!or )(?<!return )\bNone (?:for|if|where|without)\b|\bNone (?:for|where|without)\b")
QUESTION = re.compile(r"(?:What|Whether|How)\b")
# Verbs and nouns that end as participles do, and participles that do not.
NO_PARTICIPLES = {"embed", "feed", "need", "proceed", "seed", "speed"}
PARTICIPLES = {"came", "given", "held", "kept", "left", "made", "read_back", "said", "seen", "shown", "spoken", "told"}

# Phrases that a reader has to read twice, each with a plain one.
UNCLEAR = {
    r"\bso many\b": "that many, or the number",
    r"\bbut for\b": "except",
    r"\b(?:by|at) the least\b": "at least",
    r"\bof that name\b": "with that name",
    r"\bgo(?:es)? by\b": "use",
    r"\bfor none\b|\bis none\b": "there is none",
    r"\bat hand\b": "available",
    r"\ball the same\b": "anyway",
    r"\bwhoever\b": "if you",
    r"\b(?:folder|file|model|recipe|config)s? (?:says?|knows?|wants?|asks?|bears?|tells?)\b": "has, needs or supports",
    r"^Nor\b|\. Nor\b": "the usual word order",
    r"\bbears?\b|\bhold good\b": "is robust to, is true",
    r"\bthe likeliest token\b": "the top-1 token",
    r"\bthe prose that ships\b": "the bundled text",
}
GUIDES = [*sorted((HOUSE / "docs").glob("*.md")), HOUSE / "README.md", HOUSE / "CONTRIBUTING.md"]


def functions(nodes: list[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions except properties, which are values."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            "property" in ast.unparse(each) for each in node.decorator_list
        ):
            yield node


def is_participle(name: str) -> bool:
    bare = name.strip("_")
    return bare in PARTICIPLES or ("_" not in bare and bare.endswith("ed") and bare not in NO_PARTICIPLES)


def count() -> Counter[str]:
    found: Counter[str] = Counter(none=0, participles=0, questions=0)
    for path in (path for top in PRODUCT for path in files(HOUSE, top)):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [" ".join((ast.get_docstring(node) or "").split()) for node in nodes if isinstance(node, documented)]
        found["none"] += sum(len(NONE.findall(text)) for text in texts)
        found["participles"] += sum(is_participle(each.name) for each in functions(nodes))
        found["questions"] += sum(bool(QUESTION.match(ast.get_docstring(each) or "")) for each in functions(nodes))
    return found


def test_no_count_of_unclear_names_and_docstrings_grows():
    with TABLE.open(encoding="utf-8") as file:
        table = {row["what"]: int(row["count"]) for row in csv.DictReader(file)}
    found = count()
    grown = [f"{found[what]} {what}, {limit} in {TABLE.name}" for what, limit in table.items() if found[what] > limit]
    assert not grown, "say it plainly: " + "; ".join(grown)
    assert found == table, f"fewer than before: python -m tests.test_english > tests/{TABLE.name}"


def test_guides_have_no_unclear_phrase():
    found = [
        f"{guide.name}: {match[0]!r}: write {plain}"
        for guide in GUIDES
        # Code and recorded output are not prose.
        for line in re.sub(r"(?ms)^```.*?^```", "", guide.read_text(encoding="utf-8")).splitlines()
        for phrase, plain in UNCLEAR.items()
        if (match := re.search(phrase, line))
    ]
    assert not found, "\n".join(found)


if __name__ == "__main__":
    print("what,count", *(f"{what},{number}" for what, number in count().items()), sep="\n")
