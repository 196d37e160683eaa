"""Finds the Python files of a user's own module: the module and its imports, apart from installed packages."""

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.support.files import read_bytes


def module_file(name: str, folder: Path) -> Path | None:
    """Find a module's file in its importer's folder or on Python's path, or None if it is installed or built in."""
    places = (folder.joinpath(*name.split(".")), *_module_places(name))
    files = (file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"))
    return next((Path(os.path.abspath(file)) for file in files if file.is_file() and not _is_installed(file)), None)


def imported_files(file: Path) -> list[Path]:
    """List a module's file and the files of all its direct and indirect imports.

    Raises:
        UsageError: one of them cannot be read.
    """
    found: dict[Path, None] = {}
    pending = [file]
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            names = [(part, folder) for name, folder in _imports(each) for part in _with_packages(name)]
            pending += [other for name, folder in names if (other := module_file(name, folder))]
    return list(found)


def list_texts(file: Path) -> list[str]:
    """List the string constants of a module, which include the names of files that it reads."""
    return [
        node.value for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _imports(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield names that may be modules, each with the folder to search first."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, file.parent) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[max(0, node.level - 1)]
            package = node.module or ""
            yield from ((package, folder),) if package else ()
            yield from ((".".join(filter(None, (package, alias.name))), folder) for alias in node.names)


def _with_packages(name: str) -> list[str]:
    """List the names of a module's parent packages and of the module itself."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(read_bytes(file), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot read {file}, which a task of lm-eval uses: {error}") from error


def _module_places(name: str) -> Iterator[Path]:
    """Yield the paths, without suffix, at which a module would be, given where its top-level package is."""
    first, *rest = name.split(".")
    if not first or first in sys.stdlib_module_names:
        return
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    for folder in spec.submodule_search_locations or ():
        yield Path(folder, *rest)
    if spec.origin and not rest and spec.origin.endswith(".py"):
        yield Path(spec.origin).with_suffix("")


def _is_installed(file: Path) -> bool:
    """Return whether a file belongs to Python or an installed package, whose version identifies it."""
    paths = sysconfig.get_paths()
    folders = {Path(paths[kind]).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not folders.isdisjoint(file.resolve().parents)
