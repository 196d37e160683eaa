"""Checks, when it is imported, the package's symbolic links, in place of which git may have written small text files.

setup.py runs this file before the package's requirements are installed, so it imports only the standard library.
"""

from pathlib import Path

LINKS = ("benchmarks", "calib", "onnx")

if texts := [f"diffquant/{name}" for name in LINKS if (Path(__file__).parents[1] / name).is_file()]:
    cure = f"git config core.symlinks true` and `git checkout -- {' '.join(texts)}"
    raise ImportError(
        f"this clone was made without symbolic links: {', '.join(texts)} are text files; run `{cure}` "
        "(on Windows turn on developer mode first), or pip install a wheel of diffquant"
    )
