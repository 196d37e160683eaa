"""`python -m diffquant.export.native`: build the native kernel in place."""

import argparse
import subprocess
import sys
from pathlib import Path

from diffquant.errors import DiffQuantError, MissingDependencyError
from diffquant.export.native.build import LIBRARY, SOURCES, build, find_compiler


def main() -> int:
    """Build the library, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m diffquant.export.native", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=SOURCES / LIBRARY, help="library to write")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour checks")
    options = parser.parse_args()
    try:
        _build(options.output, options.sanitize)
    except DiffQuantError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(options.output)
    return 0


def _build(output: Path, sanitize: bool) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise MissingDependencyError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    try:
        build(output, compiler, sanitize)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DiffQuantError(f"{compiler} did not build {output}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
