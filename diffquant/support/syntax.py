"""Digests of source files' syntax trees, which comments, docstrings and layout do not change.

`ast.dump` differs between versions of Python, so we write the trees ourselves, without the empty fields that a version
adds and without the spelling of constants. A source has one digest in every Python from 3.11 on.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from diffquant.support.files import cache_folder, write_atomically

# Raise it when digests are computed differently.
_FORM = 1

# Some hundred bytes each, of several versions of this package.
_MOST_KEPT = 4000

# "module:name", which `pkgutil.resolve_name` imports.
_NAMED = re.compile(r"(\w+(?:\.\w+)+):\w+")

# Whether a name is read or written follows from its place; u"" is "".
_LEFT_OUT = ("ctx", "kind", "type_comment")

# A comment of C++, or a string or character, in which there is none.
_NATIVE_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)


class Syntax(NamedTuple):
    """The digest and imports of a source file.

    Attributes:
        digest: 32 hex digits of its syntax tree, without docstrings.
        imports: packages with the names imported from each; no names if the package itself is imported, or named as
            "module:name".
        fills_itself: whether it calls `import_all`, as registries do.
    """

    digest: str
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    fills_itself: bool

    @classmethod
    def of(cls, source: bytes) -> Self:
        """The syntax of a source text.

        Raises:
            SyntaxError: it is not valid Python.
        """
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        return cls(
            hashlib.sha256("".join(_written(tree)).encode()).hexdigest()[:32],
            tuple(imported for node in nodes for imported in _imported_by(node)),
            any(isinstance(called, ast.Name) and called.id == "import_all" for called in calls),
        )


class SyntaxCache:
    """A cache of sources' syntax by content, in the user's cache folder.

    If the folder cannot be written, every process parses the sources again.
    """

    def __init__(self) -> None:
        self._file = cache_folder() / f"syntax-{_FORM}.json"
        self._known = self._read()
        self._is_changed = False

    def syntax(self, source: bytes) -> Syntax:
        """The syntax of a source text."""
        content = hashlib.sha256(source).hexdigest()[:32]
        if content not in self._known:
            self._known[content] = Syntax.of(source)
            self._is_changed = True
        return self._known[content]

    def keep(self) -> None:
        """Write new entries, and drop the oldest if there are too many."""
        if self._is_changed:
            kept = dict(list(self._known.items())[-_MOST_KEPT:])
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file, json.dumps(kept))
        self._is_changed = False

    def _read(self) -> dict[str, Syntax]:
        try:
            kept = json.loads(self._file.read_bytes())
            return {content: _read_syntax(*syntax) for content, syntax in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def native_digest(source: bytes) -> str:
    """32 hex digits of a C++ source without its comments and empty lines."""
    text = _NATIVE_COMMENT.sub(lambda found: found[1] or " ", source.decode())
    lines = [line for line in map(str.rstrip, text.splitlines()) if line]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _read_syntax(digest: str, imports: list[tuple[str, list[str]]], fills_itself: bool) -> Syntax:
    return Syntax(digest, tuple((package, tuple(names)) for package, names in imports), fills_itself)


def _written(value: object) -> Iterator[str]:
    """Write a tree, a list of trees, or a constant as unambiguous text."""
    if isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for name, inner in _fields(value):
            is_constant = isinstance(value, ast.Constant) and name == "value"
            if is_constant or (name not in _LEFT_OUT and inner not in (None, [])):
                yield f"{name}="
                yield from _written(inner)
        yield ")"
    elif isinstance(value, list):
        yield "["
        for inner in value:
            if not _is_bare_string(inner):
                yield from _written(inner)
        yield "]"
    else:
        # ASCII, since the set of printable characters differs between versions.
        yield f"{type(value).__name__} {value!a},"


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends formats with an empty part.
        yield "values", [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        return
    yield from ast.iter_fields(node)


def _is_bare_string(node: object) -> bool:
    """Whether a statement is a docstring or another unused string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imported_by(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """All imports, including those inside functions, which is where most torch-heavy imports are."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module, tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := _NAMED.fullmatch(node.value)):
        yield named[1], ()
