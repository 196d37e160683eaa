"""Compiles the native kernel into the wheel where there is a compiler, and makes the long description of README.md.

Everything else is in pyproject.toml.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

runpy.run_path("diffquant/support/links.py")
native = runpy.run_path("diffquant/onnx/native/build.py")
NATIVE = "diffquant/onnx/native"


class BuildWithKernel(build_py):
    def run(self) -> None:
        super().run()
        compiler = native["find_compiler"]()
        folder = Path(NATIVE) if self.editable_mode else Path(self.build_lib, NATIVE)
        library = folder / native["LIBRARY"]
        if compiler is None:
            print("no C++ compiler: the native kernel is left out, exported models run their function body")
        else:
            try:
                native["build"](library, compiler)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"the native kernel is left out: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The library is code of one platform and of no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class KernelDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return native["find_compiler"]() is not None


def long_description() -> str:
    """README.md without pictures and links into the source tree, which lead nowhere on a package index."""
    text = Path("README.md").read_text(encoding="utf-8")
    elsewhere = r"\((?!https?:)[^)]*\)"
    return re.sub(rf"\[([^\]]*)\]{elsewhere}", r"\1", re.sub(rf"!\[[^\]]*\]{elsewhere}\n*", "", text))


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithKernel, "bdist_wheel": PlatformWheel},
    distclass=KernelDistribution,
)
