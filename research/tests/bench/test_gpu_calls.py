"""The three calls of `make gpu` and the soak, with stand-ins for what they start."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from research.bench.gpu import soak

ROOT = Path(__file__).parents[3]
# Says what it was asked for; as a sampler of clocks it goes on until it is ended.
STAND_IN = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >> "$ASKED"; echo >> "$ASKED"
case "$*" in
    *-lms*) exec sleep 60 ;;
    *"import xdist"*) exit 1 ;;
    *"$FAILING"*) exit 7 ;;
esac
"""
PROGRAMS = ("python3", "nvidia-smi", "ncu")


@pytest.fixture
def gpu(tmp_path):
    """A function that runs a target of the Makefile, and returns its status and what it asked for."""
    for name in PROGRAMS:
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    asked = tmp_path / "asked"

    def run(target, failing="what nobody asks for"):
        asked.write_text("")
        environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "ASKED": str(asked), "FAILING": failing}
        command = ["make", target, "PYTHON=python3", f"OUT={tmp_path / 'out'}"]
        status = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50
        ).returncode
        return status, [shlex.split(line) for line in asked.read_text().splitlines()]

    return run


def test_three_calls_measure_soak_test_and_profile(gpu):
    status, asked = gpu("gpu")
    assert status == 0
    started = [" ".join(words) for words in asked if "import xdist" not in words]
    wanted = [
        "-lms",
        "pytest tests/gpu/test_graphed_steps.py",
        "-m research.bench.gpu --json",
        "research.bench.gpu.soak",
    ]
    wanted += ["pytest tests/gpu ", "ncu --kernel-name _gemv", "attend_fp8_specialized", "latent_share"]
    assert [part in line for part, line in zip(wanted, started, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize(
    ("call", "failing", "later"), [("gpu-1", "test_specialized", "--json"), ("gpu-2", "soak", "tests/gpu ")]
)
def test_what_fails_stops_nothing_and_is_told(gpu, call, failing, later):
    status, asked = gpu(call, failing)
    assert status != 0
    assert any(later in " ".join(words) for words in asked)


def test_a_soak_compares_every_launch(monkeypatch, capsys):
    calls = []

    def attend(call, backend):
        calls.append((backend, call.shares_keys, call.logits.quantizes))
        return call.v + (len(calls) == 9)

    monkeypatch.setattr("diffquant.attention.attend", attend)
    soak.launch("triton-simulated-specialized", {5: 3}, "cpu")
    assert calls == [("triton-simulated-specialized", is_v2, True) for is_v2 in (False,) * 4 + (True,) * 4]
    with pytest.raises(SystemExit, match="launch 0 gave other numbers than the first"):
        soak.launch("triton-fp8-specialized", {5: 3}, "cpu")
    assert "V2, 5 tokens, 3 launches" in capsys.readouterr().out


def test_a_soak_ends_what_hangs(monkeypatch, capsys, tmp_path):
    (tmp_path / "python").write_text("#!/bin/bash\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(soak.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(soak, "SECONDS", 0.2)
    monkeypatch.setattr(soak, "KINDS", {"triton-specialized": "16"})
    assert soak.main() == 1
    assert capsys.readouterr().out == "triton-specialized: did not end in 0.2 s\n"
