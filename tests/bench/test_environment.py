"""What a raw file says of the processor, against what torch finds on it."""

import torch

from diffquant.benchmarks.measuring import environment

# Torch's names for what it uses of a processor; others say that it uses nothing of these.
_OF_TORCH = {"AVX2": ["avx2"], "AVX512": ["avx2", "avx512f"], "SVE256": ["sve"]}


def test_the_instructions_that_torch_uses_are_there():
    used = _OF_TORCH.get(torch.backends.cpu.get_cpu_capability(), [])
    assert set(used) <= set(environment()["instructions"])
