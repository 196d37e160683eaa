"""The bench of the roundings quantizes by each that it names, in processes of their own."""

import json
import subprocess
import sys

from tests.support.checkpoints import write_checkpoint


def test_each_rounding_is_timed_and_one_that_fails_is_an_error_and_no_row(tmp_path):
    source, numbers = write_checkpoint(tmp_path / "source", "unilm-v2"), tmp_path / "numbers.json"
    command = [sys.executable, "-m", "research.bench.programs.roundings", str(source), "--roundings", "nearest,mse,mde"]
    done = subprocess.run([*command, "--weights", "4:row", "--json", str(numbers)], check=False)
    assert done.returncode == 1
    result = json.loads(numbers.read_text())
    assert list(result["roundings"]) == ["nearest", "mse"]
    assert all(run["process_seconds"] > run["seconds"] > 0 for run in result["roundings"].values())
