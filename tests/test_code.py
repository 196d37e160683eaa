"""The code behind a result: versions raised by hand, the bytes of a user's own modules, and the commit."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import diffquant.measure
import diffquant.model
from diffquant.quantization.loading import MODEL_MODULES
from diffquant.support.installation import CHANGED, find_commit, result_version_digest
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
PERPLEXITY = "diffquant.measure.tasks.perplexity"


def test_a_raised_version_changes_the_digest_of_what_it_computes_alone(monkeypatch):
    model, task = result_version_digest(MODEL_MODULES), result_version_digest([PERPLEXITY])
    monkeypatch.setattr(diffquant.measure, "RESULT_VERSION", 999)
    assert result_version_digest(MODEL_MODULES) == model
    assert result_version_digest([PERPLEXITY]) != task
    monkeypatch.setattr(diffquant.model, "RESULT_VERSION", 999)
    assert result_version_digest(MODEL_MODULES) != model


def test_the_version_of_a_module_itself_counts_before_its_package_s(monkeypatch):
    before, others = result_version_digest([PERPLEXITY]), result_version_digest(["diffquant.measure.tasks.hellaswag"])
    monkeypatch.setattr(f"{PERPLEXITY}.RESULT_VERSION", 2, raising=False)
    assert result_version_digest([PERPLEXITY]) != before
    assert result_version_digest(["diffquant.measure.tasks.hellaswag"]) == others


@thorough
def test_processes_agree():
    program = "from diffquant.support.installation import result_version_digest as digest; "
    program += f"print(digest({MODEL_MODULES!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == result_version_digest(reversed(MODEL_MODULES))


def test_a_module_of_the_user_s_has_the_bytes_of_its_file(tmp_path, monkeypatch):
    file = tmp_path / "own_task.py"
    file.write_text("LIMIT = 1\n")
    spec = importlib.util.spec_from_file_location("own_task", file)
    monkeypatch.setitem(sys.modules, "own_task", importlib.util.module_from_spec(spec))
    before = result_version_digest(["own_task"])
    file.write_text("LIMIT = 2\n")
    assert result_version_digest(["own_task"]) != before
    with pytest.raises(ValueError, match="nowhere has no source file"):
        result_version_digest(["nowhere"])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package without data, its links resolved: what an installed wheel looks like."""
    ignored = shutil.ignore_patterns("__pycache__", "pocket", "*.xz", "results", "*.so")
    return shutil.copytree(ROOT / "diffquant", tmp_path_factory.mktemp("installed") / "diffquant", ignore=ignored)


def commit_of(folder):
    program = "from diffquant.support.installation import find_commit; print(find_commit() or '')"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() or None


def test_the_commit_is_the_checkouts_and_none_elsewhere(installed, tmp_path):
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (find_commit() or "").removesuffix(CHANGED) == head.strip()
    assert commit_of(installed.parent) is None
    # An environment may stand inside another project's checkout.
    subprocess.run([git, "init", "--quiet"], cwd=tmp_path, check=True)
    shutil.copytree(installed, tmp_path / ".venv" / "diffquant")
    assert commit_of(tmp_path / ".venv") is None


def test_a_checkout_says_that_its_sources_were_changed(installed, tmp_path):
    git = shutil.which("git")
    if git is None:
        pytest.skip("no git")
    shutil.copytree(installed, tmp_path / "diffquant")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "-m", "all"]):
        subprocess.run([git, *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "README.md").write_text("changed")
    (tmp_path / "mine.py").write_text("a user's own script")
    assert not commit_of(tmp_path).endswith(CHANGED)
    (tmp_path / "diffquant/family/another.py").write_text("")
    assert commit_of(tmp_path).endswith(CHANGED)
