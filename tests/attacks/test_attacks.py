"""Hostile files given to every command that reads such a file: one error, soon, and nothing else."""

import re
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from diffquant.serving import plan
from diffquant.verbs.cli.command import app
from tests.attacks.attacks import ATTACKS, Attack, make_sound
from tests.attacks.attempt import attempt, status_of
from tests.attacks.contents import CONTENTS, FILES
from tests.support.thorough import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, and limited")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    made = make_sound(tmp_path_factory.mktemp("sound"))
    # What these import, each process then has.
    for command in ("inspect", "plan", "quantize", "export", "generate", "eval", "serve"):
        work = _work(command, made["checkpoint"], made, tmp_path_factory.mktemp("first") / "out")
        assert status_of(work) == 0
    return made


def _command(name, path, sound, output):
    """The arguments of a command that reads what is hostile."""
    prompt = ("--prompt", "the the the the the the the the the the", "--max-new-tokens", "2")
    short = ("--tasks", "perplexity", "--characters", "400", "--window", "64", "--stride", "64")
    return {
        "inspect": ("inspect", path),
        "plan": ("plan", path),
        "quantize": ("quantize", path, "-o", output, "--weights", "8:row"),
        "export": ("export", path, "-o", output),
        "generate": ("generate", path, *prompt),
        "eval": ("eval", path, *short),
        "run": ("run", path, *prompt),
        "verify": ("verify", path, sound["checkpoint"]),
        "recipe": ("quantize", sound["checkpoint"], "-o", output, "--recipe", path / "recipe.yaml"),
        "report": ("report", path, "-o", f"{output}.html"),
        "compare": ("compare", path, path),
    }[name]


def _plan_server(path):
    """Plan as `serve` would where vLLM is installed."""
    asked = {"host": "127.0.0.1", "port": 8000, "context": None, "cache": "auto", "dtype": None, "ranks": 1}
    with patch("diffquant.serving.plan.check_installed"):
        return plan.plan_server(path, implementation="folder", memory=None, **asked)


def _work(name, path, sound, output):
    if name == "serve":
        return lambda: _plan_server(path)
    arguments = [str(argument) for argument in _command(name, path, sound, output)]
    return lambda: app(arguments)


def _problem(attack: Attack, command: str, sound: dict[str, Path], place: Path) -> str | None:
    shutil.rmtree(place, ignore_errors=True)
    folder = Path(shutil.copytree(sound[attack.base], place / "model", symlinks=True))
    attack.make(folder)
    path = folder / "model.gguf" if attack.base == "gguf" else folder
    ended = attempt(_work(command, path, sound, place / "out"), folder)
    if ended.broke or any(place.rglob("EXECUTED")):
        return f"ran or opened what it must not: {ended.broke}; {ended.said[-200:]}"
    if ended.status == 0 and command in attack.harmless:
        return None
    errors = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    if ended.status not in (1, 2) or len(errors) != 1 or "bug in diffquant" in ended.said or "Traceback" in ended.said:
        return f"exit status {ended.status}: {ended.said.strip()[-300:]}"
    if "out of memory" in ended.said:
        return "took more memory than it may"
    left = sorted(file.name for file in place.iterdir() if file.name not in ("model", "outside", "said", "broke"))
    return f"left {left}" if left and command not in attack.harmless else None


# Of each attack `make test` tries one command or two.
@pytest.mark.parametrize(
    ("attack", "command"),
    sampled(((attack, command) for attack in ATTACKS for command in attack.commands), 5),
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_what_is_hostile_is_refused_in_a_line_by_a_command_that_reads_it(attack, command, sound, tmp_path):
    assert _problem(attack, command, sound, tmp_path / "place") is None


def test_sound_folders_are_taken_by_the_same_commands(sound, tmp_path):
    for name in ("inspect", "quantize", "export", "generate", "eval", "serve"):
        place = tmp_path / name
        folder = Path(shutil.copytree(sound["checkpoint"], place / "model"))
        ended = attempt(_work(name, folder, sound, place / "out"), folder)
        assert ended.status == 0, ended.said
        assert not ended.broke


def test_code_of_a_stranger_is_noticed_where_it_runs(sound, tmp_path):
    folder = Path(shutil.copytree(sound["checkpoint"], tmp_path / "model"))
    (folder / "evil.py").write_text("import os\nos.system('true')\n")
    ended = attempt(lambda: exec(compile((folder / "evil.py").read_text(), folder / "evil.py", "exec")), folder)
    assert {entry.split()[0] for entry in ended.broke} == {"compile", "exec", "os.system"}


def test_the_folder_holds_what_its_page_lists_as_its_program_writes_it():
    page = (FILES.parent / "README.md").read_text()
    assert dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", page, re.M)) == {n: what for n, (what, _) in CONTENTS.items()}
    assert {file.name: file.read_bytes() for file in FILES.iterdir()} == {n: data for n, (_, data) in CONTENTS.items()}
