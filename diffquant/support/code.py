"""The code behind a result: a digest of the modules that computed it, and their commit."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from diffquant.support.syntax import Syntax, SyntaxCache, native_digest

_PACKAGE = Path(__file__).parents[1]

# These modules only show results.
_SHOWING = (
    *("diffquant.cli", "diffquant.report"),
    *(f"diffquant.evals.{name}columns" for name in ("", "margin_", "order_", "position_", "text_")),
    "diffquant.evals.plots",
)

# Suffix of a commit if sources differ from it.
CHANGED = "+changes"

# Sources of native kernels lie beside the package that loads them.
_NATIVE_SOURCES = ("*.cc", "*.h")


@cache
def code_digest(roots: tuple[str, ...], picking: tuple[str, ...] = ()) -> str:
    """16 hex digits of the code of some modules and of all diffquant modules that they import, directly or not.

    Comments, docstrings and layout do not change the digest. Modules that only show results are left out. A registry,
    which imports all modules of its package, includes them all.

    Args:
        roots: names of modules; modules outside diffquant must be imported already.
        picking: registries from which a run names what it uses, so their other modules do not count.

    Raises:
        ValueError: a root has no source file.
    """
    digests: dict[str, str] = {}
    pending = list(roots)
    while pending:
        module = pending.pop()
        if module in digests or module.startswith(_SHOWING):
            continue
        file = _file_of(module)
        if file is None:
            raise ValueError(f"module {module} has no source file whose code could be told apart")
        syntax = _syntaxes().syntax(file.read_bytes())
        digests[module] = syntax.digest
        pending += _modules_imported(syntax)
        if file.name == "__init__.py":
            if syntax.fills_itself and module not in picking:
                pending += [f"{module}.{name}" for name in _modules_in(file.parent)]
            native = [found for pattern in _NATIVE_SOURCES for found in file.parent.glob(pattern)]
            digests |= {f"{module}/{each.name}": native_digest(each.read_bytes()) for each in native}
    _syntaxes().keep()
    listed = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


@cache
def commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+changes" where sources differ from it.

    None in an installed wheel, which has no checkout.
    """
    sources = [":(top)*.py", *(f":(top){pattern}" for pattern in _NATIVE_SOURCES), ":(top,exclude)tests"]
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=all", "--", *sources)
    return None if head is None else head + (CHANGED if changed else "")


def provenance(module: str) -> dict[str, str | None]:
    """Date, commit and digest of the code of what a module measures, for the settings of its results."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": date, "commit": commit(), "code": code_digest((module,))}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _modules_imported(syntax: Syntax) -> Iterator[str]:
    """Names of our modules that a source imports."""
    for package, names in syntax.imports:
        if package.partition(".")[0] != _PACKAGE.name or not _file_of(package):
            continue
        inner = [f"{package}.{name}" for name in names]
        modules = [name for name in inner if _file_of(name)]
        yield from modules
        if not names or len(modules) < len(inner):
            yield package


@cache
def _syntaxes() -> SyntaxCache:
    return SyntaxCache()


@cache
def _file_of(module: str) -> Path | None:
    """The source file of a module, or None if it has none."""
    if module.partition(".")[0] != _PACKAGE.name:
        return Path(file) if (file := getattr(sys.modules.get(module), "__file__", None)) else None
    place = _PACKAGE.joinpath(*module.split(".")[1:])
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _modules_in(package: Path) -> list[str]:
    files = [file.stem for file in package.glob("*.py") if file.stem != "__init__"]
    return files + [file.parent.name for file in package.glob("*/__init__.py")]
