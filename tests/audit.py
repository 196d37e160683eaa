"""Looks for known vulnerabilities of the packages that constraints*.txt name, by pip-audit.

Where PyPI's list of them cannot be read, nothing is checked, and it says so; with --strict it fails there.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def findings(report: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """What pip-audit reports: a line for each vulnerability, names that it could not look up, and how many it did."""
    known, unknown, checked = [], [], 0
    for package in report["dependencies"]:
        name = package["name"]
        if "skip_reason" in package:
            unknown.append(name)
            continue
        checked += 1
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "none yet"
            known.append(f"{name} {package['version']}: {found['id']}, fixed in {fixed}")
    return known, unknown, checked


def audit(file: Path) -> tuple[list[str], list[str], int] | None:
    """The findings of a file of constraints, or None where the service could not be reached at all."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command += ["--format", "json", "--requirement", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return findings(json.loads(done.stdout))
    except ValueError:
        print(done.stderr.strip()[-500:])
        return None


def main() -> int:
    is_strict, status = "--strict" in sys.argv[1:], 0
    for file in sorted(ROOT.glob("constraints*.txt")):
        known, unknown, checked = audit(file) or ([], [], 0)
        print(*known, sep="\n", end="\n" if known else "")
        if checked:
            print(f"{file.name}: {len(known)} known vulnerabilities in {checked} packages; not found: {unknown}")
        else:
            print(f"{file.name}: not run, since PyPI's list of vulnerabilities does not answer")
        if known or (is_strict and (unknown or not checked)):
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
