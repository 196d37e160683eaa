"""`python -m diffquant.onnx.native`: build the native kernel in place."""

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from diffquant.errors import DiffQuantError, MissingDependencyError
from diffquant.onnx.native.build import LIBRARY, SOURCES, build, find_compiler


def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="Library to write.")] = SOURCES / LIBRARY,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="With address and undefined-behaviour checks.")] = False,
) -> None:
    """Build the native kernel in place."""
    compiler = find_compiler()
    if compiler is None:
        raise MissingDependencyError("no C++ compiler found; install g++ or clang++, or name one in CXX")
    try:
        build(output, compiler, sanitize)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DiffQuantError(f"{compiler} did not build {output}: {error}") from error
    print(output)


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
