"""Tests of `tests/gpu` as Triton compiles their kernels, run on the PTX machine, and what the runs took.

    python -m tests.kernels.ptx_runs bench/results/ptx-runs.json

takes about half an hour of one core, and goes on from what FILE has already. `make test-all ONLY=triton` fetches
Triton 3.6.0.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.files import write_json
from tests.support.gpu_on_ptx import CAPABILITY, RESULTS

ROOT = Path(__file__).parents[2]
OTHER_TRITON = ROOT / "build/triton-3.6.0"
# Triton, the installed one or the other, and capability.
COMBINATIONS = [(None, 90), (OTHER_TRITON, 80), (OTHER_TRITON, 90), (None, 80)]


def named(triton: Path | None, capability: int) -> str:
    return f"Triton {triton.name.removeprefix('triton-') if triton else 'installed'}, sm_{capability}"


def run(capability: int, triton: Path | None, tests: list[str], results: str = "") -> subprocess.CompletedProcess[str]:
    """Run tests on the machine, in a process where kernels are not interpreted."""
    paths = [str(ROOT)] if triton is None else [str(triton), str(ROOT)]
    # Machine code is missing from what is compiled for the machine: it is kept apart.
    cache = ROOT / "build" / ("ptx-cache" if triton is None else f"ptx-cache-{triton.name}")
    variables = os.environ | {CAPABILITY: str(capability), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    variables |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", RESULTS: results}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--noconftest", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-p", "tests.support.gpu_on_ptx", *(f"tests/gpu/{test}" for test in tests)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def main(file: Path) -> int:
    described = describe_environment()
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    part = file.with_suffix(".part.json")
    failed = 0
    for triton, capability in COMBINATIONS:
        name = named(triton, capability)
        write_json(part, runs.get(name, {"tests": {}, "kernels": {}}))
        done = run(capability, triton, [""], str(part))
        runs[name] = json.loads(part.read_text())
        write_json(file, {"environment": described, "runs": runs})
        seconds = sum(runs[name]["tests"].values())
        print(f"{name}: {len(runs[name]['tests'])} passed in {seconds / 60:.1f} minutes of a core", flush=True)
        # Status 5: none was left to run.
        if done.returncode not in (0, 5):
            failed += 1
            print(done.stdout[-20000:] + done.stderr[-2000:], file=sys.stderr, flush=True)
    part.unlink()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
