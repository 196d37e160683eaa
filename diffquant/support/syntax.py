"""What source files say to Python: digests of their syntax trees, which comments, docstrings and layout do not change.

`ast.dump` writes a tree in another way in each version of Python, so the trees are written out here: without what a
version adds empty, and without what only spells a constant. One source has one digest from Python 3.11 on.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

from diffquant.support.files import cache_folder, write_atomically

# Changes with how digests are made.
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
    """What a source file says.

    Attributes:
        digest: 32 hex digits of its syntax tree, without docstrings.
        imports: packages with the names that are imported from each; no names where it is imported itself, or named
            as "module:name".
        fills_itself: whether it calls `import_all`, as packages that are registries do.
    """

    digest: str
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    fills_itself: bool

    @classmethod
    def of(cls, source: bytes) -> Self:
        """The syntax of a source text.

        Raises:
            SyntaxError: it is no Python.
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
    """The syntax of sources, kept between processes by their contents, in the user's folder of caches.

    Where nothing can be written there, all are read anew.
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
        """Write what was read anew; of too many the oldest go."""
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
    """A tree, a list of trees, or a constant, as text that no other one has."""
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
        # ASCII, since which characters are printable is another question in each version.
        yield f"{type(value).__name__} {value!a},"


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends formats with an empty part.
        yield "values", [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        return
    yield from ast.iter_fields(node)


def _is_bare_string(node: object) -> bool:
    """Whether a statement is a docstring, or another string that nobody takes."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imported_by(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Imports wherever they stand, inside functions too: they are most of those that torch hangs on."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module, tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := _NAMED.fullmatch(node.value)):
        yield named[1], ()
