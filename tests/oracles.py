"""Run the tests that hold number formats to other libraries, and print how many numbers agreed with each, bit by bit.

    python -m tests.oracles

A test whose library is not installed is skipped, and its row is missing.
"""

import sys

import pytest

from tests.support.oracles import AGREED

FILES = (
    "tests/recipe/test_floats.py",
    "tests/recipe/test_float_peers.py",
    "tests/checkpoints/test_float_layouts.py",
    "tests/checkpoints/test_float_sources.py",
    "tests/checkpoints/test_dequantized.py",
    "tests/checkpoints/test_dequantized_peers.py",
    "tests/checkpoints/test_experts.py",
)

if __name__ == "__main__":
    result = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--durations=0", *FILES, *sys.argv[1:]])
    width = max((len(oracle) for oracle, _ in AGREED), default=0)
    for (oracle, what), numbers in sorted(AGREED.items()):
        print(f"{oracle:{width}}  {numbers:>12,}  {what}")
    sys.exit(result)
