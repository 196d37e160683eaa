"""Plants faults in a sample of places, one at a time, and says which of them no test notices.

    python -m tests.mutants [GROUP ...] [--sample N] [--seed N] [--json FILE]

An own runner, since the common ones start Python for each fault, or run all tests before they begin, and neither draws
a sample: importing torch and transformers takes seconds, so here each trial is a fork of a process that has done it.
"""

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.mutants.groups import GROUPS, Group
from tests.mutants.planting import Mutant, mutants_of
from tests.mutants.reach import Reach, measure
from tests.mutants.trial import SURVIVED, TIMED_OUT, in_a_process, outcome

REASONS = Path(__file__).with_name("survivors.yaml")
# Seconds of tests that one fault is given; those that reach it and do not fit are left out.
BUDGET = 10.0
LEAST = 0.9


def main() -> int:
    arguments = _arguments()
    reasons: dict[str, str] = yaml.safe_load(REASONS.read_text()) or {}
    results: dict[str, Any] = {}
    for name in arguments.groups or GROUPS:
        results[name] = run_group(name, GROUPS[name], arguments, reasons)
    if arguments.json:
        arguments.json.write_text(json.dumps(_described(arguments, results), indent=2) + "\n")
    return int(any(result["killed"] < LEAST * result["planted"] for result in results.values()))


def run_group(name: str, group: Group, arguments: argparse.Namespace, reasons: dict[str, str]) -> dict[str, Any]:
    """Plant a group's sample and collect what became of it."""
    started = time.monotonic()
    reach = _reach(name, group, arguments.reach)
    _import(reach.packages)
    all_mutants = [mutant for file in group.files for mutant in mutants_of(file)]
    count = min(arguments.sample, len(all_mutants))
    sample = sorted(random.Random(arguments.seed).sample(all_mutants, count), key=lambda m: (m.file, m.number))

    def trial(mutant: Mutant) -> tuple[Mutant, str]:
        tests = reach.of(mutant.file, mutant.lines, BUDGET)
        found = outcome(mutant, tests, 15 + 3 * sum(reach.seconds[test] for test in tests))
        if found == SURVIVED:
            print(f"{mutant.file}:{mutant.lines[0]}  {_change(mutant)}  [{len(tests)} tests]", flush=True)
        return mutant, found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(trial, sample))
    survivors = [
        {"file": m.file, "line": m.lines[0], "change": _change(m), "reason": reasons.get(f"{m.file}: {_change(m)}")}
        for m, found in outcomes
        if found == SURVIVED
    ]
    killed = count - len(survivors)
    print(f"{name}: {killed} of {count} killed ({killed / count:.1%}), {time.monotonic() - started:.0f} s", flush=True)
    return {
        "possible": len(all_mutants),
        "planted": count,
        "killed": killed,
        "timed_out": sum(found == TIMED_OUT for _, found in outcomes),
        "seconds": round(time.monotonic() - started),
        "survivors": survivors,
    }


def _reach(name: str, group: Group, folder: Path | None) -> Reach:
    """What the group's tests reach; kept in a folder, if one is given, for runs of the same code."""
    with tempfile.TemporaryDirectory() as temporary:
        file = (folder or Path(temporary)) / f"reach-{name}.json"
        if not file.exists():
            status = in_a_process(lambda: measure(group.files, group.tests, file), 600)
            if status != 0:
                file.unlink(missing_ok=True)
                sys.exit(f"the tests of {name} fail without any fault: {' '.join(group.tests)}")
        return Reach(**json.loads(file.read_text()))


def _import(packages: list[str]) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception:  # a part of a package that imports only from within it
            continue


def _change(mutant: Mutant) -> str:
    """The change on one line: the first line of each side says which it is."""
    before, after = (" ".join(text.split())[:100] for text in (mutant.before, mutant.after))
    return f"{before} -> {after}"


def _described(arguments: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    # Not before the last fork: each trial imports this project's modules anew.
    from diffquant.bench.environment import environment

    return {
        "command": f"python -m tests.mutants {' '.join(sys.argv[1:])}".strip(),
        "environment": environment("pytest"),
        "seed": arguments.seed,
        "sample": arguments.sample,
        "groups": results,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=GROUPS, help="groups of modules; all by default")
    parser.add_argument("--sample", type=int, default=150, help="faults planted in each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--reach", type=Path, help="folder that keeps what the tests reach")
    return parser.parse_args()


if __name__ == "__main__":
    # Trials are processes side by side, and a fork takes over no threads.
    os.environ |= {"OMP_NUM_THREADS": "1", "CI": "1"}
    sys.exit(main())
