"""Cores that a process may use, and freed memory that serves the next tensors, by the count of mapped pages."""

import os
import subprocess
import sys

import pytest

from diffquant.support.machine import cores
from tests.support.thorough import thorough

# In a process of its own: what is free, and in pieces of what size, depends on all that a process did before.
PROGRAM = """
import resource
import torch
from diffquant.support.machine import keep_freed_memory

MEGABYTES, TIMES = 24, 20

def pages_mapped():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        # Two at once, so that the first one freed is not always the last one made.
        first, second = (torch.ones(MEGABYTES * 2**18) for _ in range(2))
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_of_a_tensor = MEGABYTES * 2**20 // resource.getpagesize()
with keep_freed_memory():
    pages_mapped()  # the first ones need new memory
    print(pages_mapped() / pages_of_a_tensor)
"""


def test_cores_are_those_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert cores() == 3


def test_where_the_system_does_not_say_which_they_are_all(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores() == 6


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_large_tensors_are_mapped_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # Otherwise it is at least 7 of the 40, and all of them where the heap lies less luckily.
    assert float(done.stdout) < 0.1
