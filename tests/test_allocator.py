"""Freed memory serves the next tensors, by the kernel's own count of pages that it had to map."""

import resource
import sys

import pytest
import torch

from diffquant.support.allocator import freed_memory_kept

MEGABYTES, TIMES = 24, 20


def pages_mapped():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        # Two at once, so that the first one freed is not always the last one made.
        first, second = (torch.ones(MEGABYTES * 2**18) for _ in range(2))
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_large_tensors_are_mapped_once():
    pages_of_a_tensor = MEGABYTES * 2**20 // resource.getpagesize()
    with freed_memory_kept():
        # The first ones may need new memory.
        assert pages_mapped() < 3 * pages_of_a_tensor
        assert pages_mapped() < pages_of_a_tensor / 10
