"""A sample of the failing calls that `python -m tests.fuzz.failures` makes, and that it notices what it looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.failures import library, preloaded
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[2]


def run(*arguments, environment):
    command = [sys.executable, "-m", "tests.fuzz.failures", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    file = library(tmp_path_factory.mktemp("library"))
    if file is None:
        pytest.skip("calls fail by a library for Linux, which a C compiler makes")
    return preloaded(file)


# Of a sweep each run takes a second.
@pytest.mark.parametrize(
    ("verb", "each"),
    [
        ("quantize", 40),
        ("export", 25),
        *(
            pytest.param(verb, each, marks=thorough)
            for verb, each in {
                "quantize": 3,
                "quantize --overwrite": 3,
                "export": 1,
                "convert": 1,
                "calibrate": 1,
                "sweep": 8,
                "search": 8,
            }.items()
        ),
    ],
)
def test_a_call_that_fails_is_one_error_and_the_next_run_makes_it_good(verb, each, environment):
    done = run("--verb", verb, "--each", str(each), environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
