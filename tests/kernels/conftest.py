"""Tests of the kernels need Triton and are not collected without it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
