"""List every message of the product, to be read by someone new: `python -m tests.messages [FOLDER ...]`.

A message is a string of four words or more that is no docstring: errors, notes, help, labels and sentences of pages.
"""

import ast
import sys
from collections.abc import Iterator, Sequence

from tests.counts import HOUSE, PRODUCT, docstrings, files

_LEAST_WORDS = 4


def text_of(node: ast.expr) -> str | None:
    """Return a string's text, with what is put in between braces, or None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(each.value) + "}" if isinstance(each, ast.FormattedValue) else str(text_of(each))
            for each in node.values
        )
    return None


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line numbers and texts of a file's messages."""
    inner = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
    inner |= {id(each.value) for each in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in inner and (text := text_of(node)) is not None:
            words = " ".join(text.split())
            if words.count(" ") >= _LEAST_WORDS - 1:
                yield node.lineno, words


def main(folders: Sequence[str]) -> None:
    for path in (path for top in folders or PRODUCT for path in files(HOUSE, top)):
        for line, text in sorted(messages(ast.parse(path.read_text(encoding="utf-8")))):
            print(f"{path.relative_to(HOUSE)}:{line}: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
