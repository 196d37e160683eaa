"""Run the tests that hold number formats to other libraries, and print how many numbers agreed with each, bit by bit.

    python -m tests.oracles

A test whose library is not installed is skipped, and its row is missing.
"""

import sys

import pytest

from tests.support.oracles import AGREED

FILES = (
    "tests/numbers/test_floats.py",
    "tests/numbers/test_float_peers.py",
    "tests/checkpoint/test_float_layouts.py",
    "tests/checkpoint/test_float_sources.py",
    "tests/checkpoint/test_dequantized.py",
    "tests/checkpoint/test_dequantized_peers.py",
    "tests/checkpoint/test_experts.py",
)

if __name__ == "__main__":
    result = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "--durations=0", *FILES, *sys.argv[1:]])
    width = max((len(oracle) for oracle, _ in AGREED), default=0)
    for (oracle, what), numbers in sorted(AGREED.items()):
        print(f"{oracle:{width}}  {numbers:>12,}  {what}")
    sys.exit(result)
