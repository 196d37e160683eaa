import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from diffquant.errors import DiffQuantError, OutputExistsError
from diffquant.quantization.quantize import quantize
from diffquant.quantization.roundings.base import Rounder
from diffquant.quantization.roundings.nearest import Nearest, round_to_nearest
from diffquant.recipe import Recipe
from diffquant.recipe.rounding import RoundingSettings
from tests.support.checkpoints import contents, write_diffllama

KILLED_AT = 0.6
JOURNAL, LOCK = ".out.diffquant-journal", ".out.diffquant-lock"
RECIPE = Recipe.of(weights="4:g32", kv=8)
KILLING_RUN = f"""
import os, signal, sys
from pathlib import Path
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe

def kill(done, total, what):
    if done > {KILLED_AT} * total:
        os.kill(os.getpid(), signal.SIGKILL)

quantize(Path(sys.argv[1]), Path(sys.argv[2]), Recipe.of(weights="4:g32", kv=8), progress=kill)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A source, what quantizing it gives, and the folder a killed run left."""
    folder = tmp_path_factory.mktemp("killed")
    source = write_diffllama(folder / "source", shard_size="80KB")
    quantize(source, folder / "expected", RECIPE)
    run = subprocess.run([sys.executable, "-c", KILLING_RUN, source, folder / "out"], check=False)
    assert run.returncode == -signal.SIGKILL
    assert not (folder / "out").exists()
    return folder


@pytest.fixture
def left(killed, tmp_path):
    """The killed run's folder, in a place of its own for each test."""
    import shutil

    shutil.copytree(killed / "out.partial", tmp_path / "out.partial")
    for name in (JOURNAL, LOCK):
        shutil.copy2(killed / name, tmp_path / name)
    return tmp_path / "out.partial"


def test_a_killed_run_goes_on_to_the_same_bytes(killed, left):
    report = quantize(killed / "source", left.parent / "out", RECIPE)
    assert report.resumed > 1
    assert contents(left.parent / "out") == contents(killed / "expected")
    assert not left.exists()


def test_a_damaged_finished_shard_is_made_again(killed, left):
    first = sorted(left.glob("*.safetensors"))[0]
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    quantize(killed / "source", left.parent / "out", RECIPE)
    assert contents(left.parent / "out") == contents(killed / "expected")


def test_another_recipe_starts_over(killed, left):
    other = Recipe.of(weights="8:row")
    assert quantize(killed / "source", left.parent / "out", other).resumed == 0
    quantize(killed / "source", left.parent / "fresh", other)
    assert contents(left.parent / "out") == contents(left.parent / "fresh")


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float16"}, {"recipe": replace(RECIPE, rounding=RoundingSettings("mse"))}],
    ids=["dtype", "rounding"],
)
def test_other_options_start_over(killed, left, options):
    options = {"recipe": RECIPE} | options
    assert quantize(killed / "source", left.parent / "out", **options).resumed == 0
    quantize(killed / "source", left.parent / "fresh", **options)
    assert contents(left.parent / "out") == contents(left.parent / "fresh")


def test_a_rounding_that_read_something_else_starts_over(killed, left, monkeypatch):
    rounder = Rounder(round_to_nearest, identity={"text": "another"})
    monkeypatch.setattr(Nearest, "prepare", lambda *_: rounder)
    assert quantize(killed / "source", left.parent / "out", RECIPE).resumed == 0


def test_another_release_starts_over(killed, left, monkeypatch):
    monkeypatch.setattr("diffquant.quantization.quantize.versions", lambda: {"diffquant": "99"})
    assert quantize(killed / "source", left.parent / "out", RECIPE).resumed == 0


def test_a_source_that_was_written_again_starts_over(killed, left):
    shard = sorted((killed / "source").glob("*.safetensors"))[0]
    times = shard.stat()
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000))
    try:
        assert quantize(killed / "source", left.parent / "out", RECIPE).resumed == 0
    finally:
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_unreadable_journal_starts_over(killed, left):
    (left.parent / JOURNAL).write_text('{"key": ')
    assert quantize(killed / "source", left.parent / "out", RECIPE).resumed == 0
    assert contents(left.parent / "out") == contents(killed / "expected")


def test_a_lock_ends_with_the_process_that_was_killed_holding_it(killed, left):
    hold = """
import sys, time
from pathlib import Path
from diffquant.checkpoints.atomic_folder import stage_output
with stage_output(Path(sys.argv[1]), {}, 1, overwrite=False):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", hold, left.parent / "out"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DiffQuantError, match="another run is writing"):
            quantize(killed / "source", left.parent / "out", RECIPE)
        holder.kill()
    quantize(killed / "source", left.parent / "out", RECIPE)
    assert contents(left.parent / "out") == contents(killed / "expected")
    assert not left.exists()


def test_a_foreign_folder_of_the_partial_name_is_not_touched(killed, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="contains other files"):
        quantize(killed / "source", tmp_path / "out", RECIPE)
    assert (tmp_path / "out.partial/mine.txt").read_text() == "mine"


def test_an_old_output_returns_if_the_run_died_while_replacing_it(killed, tmp_path):
    quantize(killed / "source", tmp_path / "out", RECIPE)
    (tmp_path / "out").rename(tmp_path / ".out.diffquant-replaced")
    with pytest.raises(OutputExistsError):
        quantize(killed / "source", tmp_path / "out", RECIPE)
    assert contents(tmp_path / "out") == contents(killed / "expected")


def test_shards_whose_digests_are_sha256_are_written_again(killed, left):
    """As an earlier version recorded them."""
    journal = json.loads((left.parent / JOURNAL).read_text())
    for name, record in journal["shards"].items():
        del record["digest"]
        record["sha256"] = hashlib.sha256((left / name).read_bytes()).hexdigest()
    (left.parent / JOURNAL).write_text(json.dumps(journal))
    assert quantize(killed / "source", left.parent / "out", RECIPE).resumed == 0
    assert contents(left.parent / "out") == contents(killed / "expected")
