"""The digest of the code behind a result: what changes it, and what does not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffquant.support.code import CHANGED, code_digest, commit
from diffquant.support.syntax import Syntax, SyntaxCache, native_digest

ROOT = Path(__file__).parents[1]
ROOTS = ("diffquant.sweep.subject", "diffquant.evals.tasks.perplexity")
PICKED = ("diffquant.evals.tasks", "diffquant.numbers.formats", "diffquant.quantization.roundings")

DIGEST = f"""
import time, sys
from diffquant.support.code import code_digest, commit
started = time.perf_counter()
digest = code_digest({ROOTS!r}, {PICKED!r})
seconds = time.perf_counter() - started
exported = code_digest(("diffquant.export.runtime.scoring",), {PICKED!r})
import json; print(json.dumps([digest, exported, commit(), seconds, "torch" in sys.modules]))
"""


def copy_package(folder):
    """The package without data, its links resolved: what an installed wheel looks like."""
    ignored = shutil.ignore_patterns("__pycache__", "pocket", "*.xz", "results", "*.so")
    return shutil.copytree(ROOT / "diffquant", folder / "diffquant", ignore=ignored)


def told_by(folder):
    done = subprocess.run(
        [sys.executable, "-c", DIGEST],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    digest, exported, found_commit, seconds, imported_torch = json.loads(done.stdout)
    return digest, exported, found_commit, seconds, imported_torch


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return copy_package(tmp_path_factory.mktemp("installed"))


def which_change(installed, file, change):
    """Whether the digests of cells and of exports change with a file."""
    before = told_by(installed.parent)
    source = installed / file
    kept = source.read_text()
    try:
        source.write_text(change(kept))
        after = told_by(installed.parent)
    finally:
        source.write_text(kept)
    return after[0] != before[0], after[1] != before[1]


@pytest.mark.parametrize(
    ("file", "cells_change", "exports_change"),
    [
        ("attention/backends/blocks.py", True, True),
        ("family/lam.py", True, True),
        ("evals/tasks/perplexity.py", True, False),
        ("evals/protocols/perplexity.py", True, False),
        ("numbers/packing.py", True, True),
        ("model/modeling.py", True, True),
        ("model/sambay/scan.py", True, True),
        ("numbers/formats/integer.py", True, True),
        ("errors.py", True, True),
        ("export/native/node.cc", False, True),
        ("export/runtime/session.py", False, True),
        ("report/tables.py", False, False),
        ("cli/show.py", False, False),
        ("evals/plots/places.py", False, False),
        ("evals/columns.py", False, False),
        ("evals/text_columns.py", False, False),
        ("evals/tasks/hellaswag.py", False, False),
        ("quantization/roundings/mse.py", False, False),
        ("sweep/plot.py", False, False),
    ],
)
def test_a_change_of_code_changes_the_digest_of_what_it_computes_alone(installed, file, cells_change, exports_change):
    change = "int changed;" if file.endswith(".cc") else "changed = 1"
    assert which_change(installed, file, lambda text: f"{text}\n{change}\n") == (cells_change, exports_change)


@pytest.mark.parametrize("file", ["errors.py", "attention/naive.py", "evals/tasks/perplexity.py"])
def test_comments_docstrings_and_layout_change_no_digest(installed, file):
    def explained(text):
        _, _, rest = text.partition("\n")
        docstring = '"""Another docstring, whose example is no import.\n\nfrom diffquant.cli import main\n"""'
        return f"{docstring}\n# A comment.\n{rest}".replace("    def ", "    # Another comment.\n\n    def ")

    assert which_change(installed, file, explained) == (False, False)


def test_a_comment_in_c_changes_no_digest_and_what_only_looks_like_one_does():
    code = b'int a = 1;\nconst char* b = "// no comment";\n'
    commented = b'// What a is.\n\nint a = 1;  // one\n/* two\n lines */\nconst char* b = "// no comment"; /* last */\n'
    assert native_digest(commented) == native_digest(code)
    assert native_digest(code.replace(b"// no", b"// a")) != native_digest(code)
    assert native_digest(code.replace(b"= 1", b"= 2")) != native_digest(code)


SAMPLE = """
import torch
from diffquant.errors import UsageError

LIMIT = 4

class Scale:
    '''What a scale is.'''

    largest: float = 1.0

    def of(self, x, *, bits=8, name=None):
        if name == "":
            raise UsageError(f"{name!r} has {x:>{bits}} and {self.largest:+.2f}")
        return x.abs().amax(-1) / (2 ** (bits - 1) - 1)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 4", "LIMIT = 5"),
        ("LIMIT = 4", "LIMIT = 4.0"),
        ("LIMIT = 4", "LIMIT = '4'"),
        ("bits=8", "bits=6"),
        ("name=None", "name=False"),
        ("self.largest:", "self.lowest:"),
        ("amax", "amin"),
        ("of(self", "to(self"),
        ("largest: float = 1.0", "largest: float = -1.0"),
        ("bits - 1) - 1", "bits - 1 - 1)"),
        ('name == ""', 'name == "x"'),
        ("*, bits", "bits"),
        ("has {x", "had {x"),
        ("import torch", "import torch as t"),
        ("from diffquant.errors", "from diffquant.scheme"),
    ],
)
def test_whatever_a_source_says_to_python_changes_its_digest(before, after):
    assert SAMPLE.count(before) == 1
    assert Syntax.of(SAMPLE.replace(before, after).encode()).digest != Syntax.of(SAMPLE.encode()).digest


def test_every_version_of_python_gives_a_source_one_digest():
    # As 3.11, 3.12 and 3.13 have it, whose `ast.dump` gives three.
    assert Syntax.of(SAMPLE.encode()).digest == "3afdbbdfed6babe87a9b05127295b4fc"


def test_what_is_imported_inside_functions_or_named_as_text_counts_and_what_a_docstring_shows_does_not():
    source = b'''
"""An example.

from diffquant.cli import main
"""
import diffquant.scheme

CLASS = "diffquant.model.modeling:DiffTransformer"

def late():
    from diffquant.errors import (
        CheckpointError,  # where it is read
        UsageError as Wrong,
    )
'''
    assert sorted(Syntax.of(source).imports) == [
        ("diffquant.errors", ("CheckpointError", "UsageError")),
        ("diffquant.model.modeling", ()),
        ("diffquant.scheme", ()),
    ]


def test_processes_and_installations_agree(installed):
    digest, exported, *_ = told_by(ROOT)
    assert told_by(installed.parent)[:2] == (digest, exported)
    assert digest == code_digest(ROOTS, PICKED)
    assert digest != exported


def test_what_was_read_once_is_cheap_and_needs_no_torch():
    told_by(ROOT)
    *_, seconds, imported_torch = told_by(ROOT)
    assert seconds < 0.5
    assert not imported_torch


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"0": 1}', b'{"0": [1, 2, 3]}'])
def test_a_damaged_cache_and_one_that_cannot_be_written_change_nothing(tmp_path, monkeypatch, damage):
    source = SAMPLE.encode()

    def read():
        cache = SyntaxCache()
        syntax = cache.syntax(source)
        cache.keep()
        return syntax

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read() == read() == Syntax.of(source)
    (kept,) = (tmp_path / "diffquant").iterdir()
    kept.write_bytes(damage)
    assert read() == Syntax.of(source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert read() == Syntax.of(source)


def test_the_commit_is_the_checkouts_and_none_elsewhere(installed, tmp_path):
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (commit() or "").removesuffix(CHANGED) == head.strip()
    assert told_by(installed.parent)[2] is None
    # An environment may stand inside another project's checkout.
    subprocess.run([git, "init", "--quiet"], cwd=tmp_path, check=True)
    shutil.copytree(installed, tmp_path / ".venv" / "diffquant")
    assert told_by(tmp_path / ".venv")[2] is None


def test_a_checkout_says_that_its_sources_were_changed(installed, tmp_path):
    git = shutil.which("git")
    if git is None:
        pytest.skip("no git")
    shutil.copytree(installed, tmp_path / "diffquant")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run([git, *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "README.md").write_text("changed")
    assert not told_by(tmp_path)[2].endswith(CHANGED)
    (tmp_path / "diffquant/family/another.py").write_text("")
    assert told_by(tmp_path)[2].endswith(CHANGED)


def test_modules_of_other_packages_count_with_what_they_import():
    digest = code_digest((__name__,))
    assert digest == code_digest((__name__,))
    with pytest.raises(ValueError, match="nowhere has no source file"):
        code_digest(("nowhere",))
