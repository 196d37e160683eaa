"""Plants faults in a sample of places, one at a time, and says which of them no test notices.

    python -m tests.mutants [GROUP ...] [--sample N] [--seed N] [--json FILE]
    python -m tests.mutants [GROUP ...] --again FILE                  # those that survived, with the tests of now
    python -m tests.mutants GROUP --draw --json FILE                  # the sample alone: all of it counts as survivors
    python -m tests.mutants GROUP --again FILE --ask TEST ...         # survivors by these tests alone, at once
    python -m tests.mutants GROUP --again FILE --in MODULE ...        # survivors in these files alone

With --seconds, a run ends early, and the next one with --again begins with what is left.

An own runner, since the common ones start Python for each fault, or run all tests before they begin, and neither draws
a sample: importing torch and transformers takes seconds, so here each trial is a fork of a process that has done it.
"""

import argparse
import importlib
import json
import lzma
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.mutants.groups import GROUPS, Group
from tests.mutants.planting import Mutant, mutants_of
from tests.mutants.reach import Asked, Reach, measure, others_since
from tests.mutants.trial import KILLED, SURVIVED, in_a_process, outcome, status_of

REASONS = Path(__file__).with_name("survivors.yaml")
# Seconds of tests that one fault is given; those that reach it and do not fit are left out.
BUDGET = 10.0
LEAST = 0.9
# What becomes of a fault that there was no time for.
LEFT = "left"

# (file, first line of the changed statement, change) -> why no test can notice.
Reasons = dict[tuple[str, str, str], str]


def main() -> int:
    arguments = _arguments()
    reasons = reasons_for_surviving(yaml.safe_load(REASONS.read_text()))
    file = arguments.again or arguments.json
    # Groups that are not asked for stay in the file as they are.
    results: dict[str, Any] = _groups(file) if file else {}
    earlier = dict(results) if arguments.again else {}
    for name in arguments.groups or GROUPS:
        results[name] = run_group(name, GROUPS[name], arguments, reasons, earlier.get(name))
    if file:
        from diffquant.support.files import write_json

        run = None if arguments.draw else _this_run()
        for name in arguments.groups or GROUPS:
            results[name]["runs"] += [run | {"killed": results[name]["killed"]}] if run else []
        write_json(file, {"groups": results})
    return int(any(result["killed"] < LEAST * result["planted"] for result in results.values()))


def _groups(file: Path) -> dict[str, Any]:
    """Results of an earlier run by group, from FILE or FILE.xz; none if there is neither."""
    # Not by diffquant.support.xz: each trial imports this project's modules anew.
    packed = file.with_name(f"{file.name}.xz")
    if not file.exists() and not packed.exists():
        return {}
    read: dict[str, dict[str, Any]] = json.loads(
        file.read_bytes() if file.exists() else lzma.decompress(packed.read_bytes())
    )
    return read["groups"]


def reasons_for_surviving(entries: Sequence[dict[str, Any]]) -> Reasons:
    """Reasons by fault, from the entries of survivors.yaml."""
    return {(entry["file"], entry["code"], change): entry["reason"] for entry in entries for change in entry["changes"]}


def run_group(
    name: str, group: Group, arguments: argparse.Namespace, reasons: Reasons, earlier: dict[str, Any] | None
) -> dict[str, Any]:
    """Plant a group's sample, or what survived of an earlier one, and collect what became of it."""
    every = [mutant for file in group.files for mutant in mutants_of(file)]
    if earlier is None:
        count = min(arguments.sample or group.sample, len(every))
        earlier = {"runs": [], "seed": arguments.seed, "possible": len(every), "planted": count}
        chosen = random.Random(arguments.seed).sample(every, count)
        chosen.sort(key=lambda mutant: (mutant.file, mutant.number))
    else:
        by_place = {(mutant.file, mutant.number): mutant for mutant in every}
        chosen = [by_place[survivor["file"], survivor["number"]] for survivor in earlier["survivors"]]
    asked = [mutant for mutant in chosen if not arguments.files or mutant.file in arguments.files]
    rest = [mutant for mutant in chosen if mutant not in asked]
    survivors = chosen if arguments.draw else _survivors(name, group, asked, arguments) + rest
    planted = earlier["planted"]
    killed = planted - len(survivors)
    print(f"{name}: {killed} of {planted} killed ({killed / planted:.1%})", flush=True)
    return earlier | {
        "killed": killed,
        "survivors": [
            {
                "file": mutant.file,
                "line": mutant.lines[0],
                "number": mutant.number,
                "code": mutant.code,
                "change": mutant.change,
                "reason": reasons.get((mutant.file, mutant.code, mutant.change)),
            }
            for mutant in survivors
        ],
    }


def _survivors(name: str, group: Group, mutants: Sequence[Mutant], arguments: argparse.Namespace) -> list[Mutant]:
    """Faults that no test notices, those first that there was no time for."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments.ask:
            reach: Reach | Asked = _asked(arguments.ask, Path(folder) / "packages.json")
        else:
            reach = _reach(name, group, arguments.reach or Path(folder))
    _import(reach.packages)
    outcomes = _outcomes(mutants, () if arguments.ask else group.first, reach, arguments.jobs, arguments.seconds)
    return [mutant for kind in (LEFT, SURVIVED) for mutant, found in outcomes if found == kind]


def _outcomes(
    mutants: Sequence[Mutant], first: Sequence[str], reach: Reach | Asked, jobs: int, seconds: float
) -> list[tuple[Mutant, str]]:
    before = _spent()

    def trial(mutant: Mutant) -> tuple[Mutant, str]:
        if _spent() - before > seconds:
            return mutant, LEFT
        tests = list(dict.fromkeys([*first, *reach.of(mutant.file, mutant.lines, BUDGET)]))
        found = outcome(mutant, tests, 15 + 3 * reach.seconds_of(tests))
        if found != KILLED:
            print(f"{found}: {mutant.file}:{mutant.lines[0]}  {mutant.change}  [{len(tests)} tests]", flush=True)
        return mutant, found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(trial, mutants))


def _spent() -> float:
    """Processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _reach(name: str, group: Group, folder: Path) -> Reach:
    """What the group's tests reach: measured, or read where it was measured on the same files."""
    file = folder / f"reach-{name}.json"
    if file.exists() and (reach := Reach(**json.loads(file.read_text()))).is_of(group.files, group.tests):
        return reach
    if in_a_process(lambda: measure(group.files, group.tests, file), 600) != 0:
        sys.exit(f"the tests of {name} fail without any fault: {' '.join(group.tests)}")
    return Reach(**json.loads(file.read_text()))


def _write_packages(tests: list[str], file: Path) -> int:
    """Run tests and write which modules of other packages they import; the exit status of pytest."""
    before = set(sys.modules)
    status = status_of(tests)
    from diffquant.support.files import write_json

    write_json(file, others_since(before))
    return status


def _asked(tests: list[str], file: Path) -> Asked:
    """Tests that are named, which pass without a fault: only then does their failing say that one was noticed."""
    if in_a_process(lambda: _write_packages(tests, file), 60.0 * len(tests)) != 0:
        sys.exit(f"tests fail without any fault: {' '.join(tests)}")
    return Asked(tests, json.loads(file.read_text()))


def _import(packages: Sequence[str]) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception:  # a part of a package that imports only from within it
            continue


def _this_run() -> dict[str, Any]:
    # Not before the last fork: each trial imports this project's modules anew.
    from diffquant.bench.environment import environment

    # The folder of what is reached is this machine's.
    words = ["FOLDER" if before == "--reach" else word for before, word in pairwise(sys.argv)]
    command = f"python -m tests.mutants {' '.join(words)}".strip()
    return {"command": command, "environment": environment("pytest")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"{', '.join(GROUPS)}; all by default")
    parser.add_argument("--sample", type=int, help="faults planted in each group, in place of its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--again", type=Path, help="file of results whose survivors are planted again, and corrected")
    parser.add_argument(
        "--ask", nargs="+", metavar="TEST", help="tests of these survivors, in place of those that reach"
    )
    parser.add_argument("--in", nargs="+", metavar="FILE", dest="files", help="plant survivors in these files alone")
    parser.add_argument("--draw", action="store_true", help="plant nothing: only say what the sample is")
    parser.add_argument("--seconds", type=float, default=math.inf, help="processor time after which nothing is planted")
    parser.add_argument("--reach", type=Path, help="folder that keeps what the tests reach")
    arguments = parser.parse_args()
    if (arguments.ask or arguments.files) and not arguments.again:
        parser.error("--ask and --in are for --again")
    if unknown := set(arguments.groups) - set(GROUPS):
        parser.error(f"no group is called {', '.join(sorted(unknown))}; known are {', '.join(GROUPS)}")
    return arguments


if __name__ == "__main__":
    # Trials are processes side by side, and a fork takes over no threads.
    os.environ |= {"OMP_NUM_THREADS": "1", "CI": "1"}
    sys.exit(main())
