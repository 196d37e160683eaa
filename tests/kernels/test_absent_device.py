"""The driver that runs nothing takes what CUDA's takes, and refuses what that refuses."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from tests.support.absent_device import install


@triton.jit
def double(x, n):
    tl.store(x + tl.program_id(1) % n, tl.load(x) * 2)


@triton.jit
def load(described, out, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, described.load([0, 0]))


@triton.jit
def pipelined(a, b, out, n, STEP: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, STEP)
    total = tl.zeros([64, 64], tl.float32)
    for k in tl.range(0, n, STEP, num_stages=6):
        left = tl.load(a + row * n + k + column[None, :])
        total = tl.dot(left, tl.load(b + (k + column)[:, None] * 64 + tl.arange(0, 64)[None, :]), total)
    tl.store(out + row * 64 + tl.arange(0, 64)[None, :], total)


def outcome(capability, launch):
    device.capability = capability
    before = device.launches
    try:
        launch()
        print("launched" if device.launches == before + 1 else "lost")
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])


device = install()
x = torch.ones(256, 64, dtype=torch.float16)
outcome(80, lambda: double[(70_000, 65_535)](x, 1))
outcome(80, lambda: double[(1, 65_536)](x, 1))
outcome(90, lambda: load[(1,)](TensorDescriptor(x, [256, 64], [64, 1], [64, 64]), x.clone(), 64))
outcome(90, lambda: load[(1,)](TensorDescriptor(x.flatten()[4:], [128, 64], [64, 1], [64, 64]), x.clone(), 64))
outcome(90, lambda: load[(1,)](TensorDescriptor(x, [256, 64], [68, 1], [64, 64]), x.clone(), 64))
a, out = torch.zeros(64, 4096, dtype=torch.float16), torch.zeros(64, 64)
for capability in (80, 86):
    outcome(capability, lambda: pipelined[(1,)](a, a, out, 4096, 128))
"""


def test_launches_are_refused_as_cuda_would(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    # Triton reads a kernel's source from its file.
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], env=environment, capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 7, done.stderr
    good_grid, long_grid, descriptor, shifted, uneven, large_card, small_card = said
    assert good_grid == descriptor == large_card == "launched"
    assert "invalid argument" in long_grid
    assert "launched" not in shifted + uneven
    assert small_card.startswith("OutOfResources")
