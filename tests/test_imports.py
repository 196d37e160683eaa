"""What import-linter cannot say of imports: when they happen, and what they may bring with them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.tables import in_one_test

ROOT = Path(__file__).parents[1]
ROOMS = ("diffquant.export", "diffquant.calib", "diffquant.bench")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def imported_at_once(statements: list[ast.stmt]) -> Iterator[str]:
    """Names of the modules that statements import outside of functions."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from imported_at_once([s for s in ast.walk(statement) if isinstance(s, ast.Import | ast.ImportFrom)])


@in_one_test("file", python_files("diffquant/verbs/cli", "diffquant/verbs"))
def test_the_command_line_imports_a_room_when_it_is_asked_for(file):
    modules = imported_at_once(ast.parse(file.read_text()).body)
    assert not [module for module in modules if module.startswith(ROOMS)]


def test_no_import_hides_its_module_in_a_string():
    """Linters and type checkers see names in import statements alone."""
    files = python_files("diffquant", "export", "calib", "bench", "research")
    assert not [file for file in files if re.search(r'import_module\(f?"(diffquant|\.)', file.read_text())]


def test_neither_the_package_nor_its_tests_import_the_research():
    files = python_files("diffquant", "export", "calib", "bench", "examples", "tests")
    assert not [file for file in files if re.search(r"^\s*(from|import) research\b", file.read_text(), re.MULTILINE)]


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after running some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HELP = """
import sys
sys.argv = ["diffquant", "--help"]
from diffquant.verbs.cli import main
try:
    main()
except SystemExit:
    pass
"""


@in_one_test(
    ("code", "unneeded"),
    [
        ("import diffquant; dir(diffquant)", "torch transformers numpy yaml"),
        (HELP, "torch transformers numpy matplotlib yaml"),
        (
            "from diffquant.recipe import Recipe; Recipe.of(weights='4:g32', kv='4:row:rotated', logits='6:b8:shift')",
            "torch transformers numpy matplotlib yaml",
        ),
        ("import diffquant.attention", "transformers typer yaml matplotlib safetensors"),
        ("import diffquant.measure.sweep.cell, diffquant.measure.sweep.workers", "torch"),
        ("import diffquant.measure.sweep.run", "ray"),
    ],
)
def test_libraries_are_imported_where_they_are_needed(code, unneeded):
    assert not modules_after(code) & set(unneeded.split())
