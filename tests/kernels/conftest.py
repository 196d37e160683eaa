"""Tests of the kernels need Triton and are not collected without it."""

from importlib.util import find_spec

from tests.support.completeness import is_complete

collect_ignore_glob = [] if is_complete() or find_spec("triton") else ["test_*.py"]
