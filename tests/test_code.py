"""The digest of the code behind a result: what changes it, and what does not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffquant.support.code import CHANGED, code_digest, commit

ROOT = Path(__file__).parents[1]
ROOTS = ("diffquant.sweep.session", "diffquant.evals.tasks.perplexity")
PICKED = ("diffquant.evals.tasks", "diffquant.quantization.roundings")

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
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    digest, exported, found_commit, seconds, imported_torch = json.loads(done.stdout)
    return digest, exported, found_commit, seconds, imported_torch


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return copy_package(tmp_path_factory.mktemp("installed"))


@pytest.mark.parametrize(
    ("file", "cells_change", "exports_change"),
    [
        ("attention/backends/simulated.py", True, True),
        ("family/lam.py", True, True),
        ("evals/tasks/perplexity.py", True, False),
        ("evals/protocols/perplexity.py", True, False),
        ("numerics/packing.py", True, True),
        ("export/native/node.cc", False, True),
        ("export/runtime/session.py", False, True),
        ("report/tables.py", False, False),
        ("cli/show.py", False, False),
        ("evals/plots/places.py", False, False),
        ("evals/columns.py", False, False),
        ("evals/tasks/hellaswag.py", False, False),
        ("quantization/roundings/mse.py", False, False),
        ("sweep/plot.py", False, False),
    ],
)
def test_a_change_of_code_changes_the_digest_of_what_it_computes_alone(installed, file, cells_change, exports_change):
    before = told_by(installed.parent)
    source = installed / file
    kept = source.read_text()
    try:
        source.write_text(kept + "\n")
        after = told_by(installed.parent)
    finally:
        source.write_text(kept)
    assert (after[0] != before[0], after[1] != before[1]) == (cells_change, exports_change)


def test_processes_and_installations_agree(installed):
    digest, exported, *_ = told_by(ROOT)
    assert told_by(installed.parent)[:2] == (digest, exported)
    assert digest == code_digest(ROOTS, PICKED)
    assert digest != exported


def test_it_is_cheap_and_needs_no_torch():
    *_, seconds, imported_torch = told_by(ROOT)
    assert seconds < 0.5
    assert not imported_torch


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
