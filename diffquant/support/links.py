"""Checks the package's symbolic links, in place of which git may have written small text files.

setup.py runs this file before the package's requirements are installed, so it imports only the standard library.
"""

from pathlib import Path

LINKS = ("benchmarks", "calib", "onnx")


def check_symbolic_links(package: Path) -> None:
    """Check that a package's symbolic links lead to folders.

    Raises:
        ImportError: git wrote text files in their place.
    """
    texts = [f"diffquant/{name}" for name in LINKS if (package / name).is_file()]
    if texts:
        cure = f"git config core.symlinks true` and `git checkout -- {' '.join(texts)}"
        raise ImportError(
            f"this clone was made without symbolic links: {', '.join(texts)} are text files; run `{cure}` "
            "(on Windows turn on developer mode first), or pip install a wheel of diffquant"
        )
