"""The number of kernels that `make gpu-test` and `make gpu-bench` compile, which is most of what they take.

Each has six minutes, which the bounds below keep if a kernel takes twice the 1.3 CPU seconds on average that 774 of the
tests' kernels took beside an H100, by Triton 3.6 and with other programs. All of the bench's were there after 71 s.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
BENCH = "bench_launches.py"
SECONDS_A_KERNEL = 2.6
MINUTES = 6.0
# `make gpu-test` runs twelve processes on 16 cores. 60 seconds are for what is not compiling: starting, 64K contexts.
MOST_IN_TESTS = int((60 * MINUTES - 60) * 12 / SECONDS_A_KERNEL)
# `make gpu-bench` compiles its groups side by side, and would have the time for all of them one after the other. 60
# seconds are for measuring, which took 20 there, and ten kernels for the group that generates text: it is not counted.
MOST_IN_BENCH = int((60 * MINUTES - 60) / SECONDS_A_KERNEL) - 10


def kernels_by_file(folder):
    """Number of kernels by test file and by kernel, counted in a process of its own, which takes about 50 seconds."""
    counts = folder / "counts.json"
    environment = os.environ | {"DIFFQUANT_COUNTS": str(counts), "TRITON_INTERPRET": "0"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", f"tests/support/{BENCH}", "-q", "-n", "0", "--noconftest"]
    command += ["--tb=line", "-p", "no:cacheprovider", "-p", "tests.support.uncompiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert counts.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    # Tests that read values fail at an assertion, after their launches; another error would hide launches.
    errors = [line for line in done.stdout.splitlines() if line.startswith("E  ") and "assert " not in line]
    assert not errors, errors[:5]
    return json.loads(counts.read_text())


# One test, since two might count in two processes.
@thorough
def test_tests_and_bench_compile_no_more_for_a_gpu_than_their_minutes_allow(tmp_path):
    pytest.importorskip("triton")
    kernels = kernels_by_file(tmp_path)
    assert set(kernels) == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")} | {BENCH}
    in_bench = kernels.pop(BENCH)
    counts = {file: sum(by_name.values()) for file, by_name in kernels.items()}
    assert sum(counts.values()) <= MOST_IN_TESTS, counts
    # A peer that fails is a line in the bench's table, and its kernels would not be counted.
    assert {"prefill_v1", "prefill_v2", "attend_int8", "attend_rounded", "decode_share", "_gemv"} <= set(in_bench)
    assert {"attend_specialized", "attend_fp8_specialized"} <= set(in_bench)
    assert sum(in_bench.values()) <= MOST_IN_BENCH, in_bench
