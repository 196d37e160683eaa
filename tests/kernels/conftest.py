"""Tests of the kernels need Triton and are not collected without it."""

from contextlib import ExitStack
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from diffquant.kernels.gpu import SMALLEST_SHARED_MEMORY, Gpu
from tests.support.absent_gpu import simulate_gpu
from tests.support.completeness import is_complete

collect_ignore_glob = [] if is_complete() or find_spec("triton") else ["test_*.py"]


@pytest.fixture
def rounded_as_a_gpu_does(monkeypatch):
    """Triton's interpreter drops the carry where e4m3 rounds up to the next power of two."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x, source, target, rounding):
        if target != tl.float8e4nv:
            return convert(x, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).clamp(-448, 448)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def has_capability():
    """Give launch code a compute capability, beside the interpreter's shared memory and processors.

    Modules that launch code imports late keep what they import, so `gpu.compute_capability` itself may not be replaced.
    """
    with ExitStack() as assumed:
        yield lambda *version: assumed.enter_context(simulate_gpu(Gpu(version, SMALLEST_SHARED_MEMORY, 8)))
