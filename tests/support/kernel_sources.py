"""Digests of what a launch would compile, by which a record of a compilation tells whether it is of today's kernels.

A digest is of the code of a launch's kernels and of all that they call, of their arguments' types and constants and of
their options. Nothing is compiled, and comments, docstrings and line numbers do not count.
"""

import ast
import hashlib
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.absent_device import install
from tests.support.offline import answered


def sources(module_file: str, triton: Path | None = None) -> dict[str, str | None]:
    """The digest of each of a test module's `launches()` by name, None for one that launches nothing.

    Args:
        module_file: file of the test module.
        triton: folder of another Triton than the one that is installed.
    """
    return answered(__name__, module_file, triton)


def _without_docstring(source: str) -> str:
    tree = ast.parse(source)
    body = tree.body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body[0].value.value = ""
    return ast.unparse(tree)


def main(module: str) -> None:
    import torch
    from triton import compiler
    from triton.runtime import jit

    device = install()
    launched: list[str] = []
    set_up, run = jit.JITCallable.__init__, jit.JITFunction.run

    def set_up_alike(self: Any, function: Any) -> None:
        set_up(self, function)
        self.starting_line_number = 0
        self._src = _without_docstring(self._src)

    def digested(source: Any, target: Any, options: dict[str, Any], **_: Any) -> Any:
        chosen = asdict(compiler.make_backend(target).parse_options(dict(options)))
        # A path in Triton's own folder.
        chosen.pop("extern_libs")
        return SimpleNamespace(text=f"{source.name} {source.hash()} {sorted(chosen.items())}")

    def not_run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options | {"warmup": True})
        launched.append(kernel.text)
        return kernel

    vars(compiler).update(compile=digested)
    jit.JITCallable.__init__, jit.JITFunction.run = set_up_alike, not_run
    digests = {}
    with torch.no_grad():
        for name, device.capability, call in importlib.import_module(module).launches():
            launched.clear()
            call()
            digests[name] = hashlib.sha256("\n".join(launched).encode()).hexdigest()[:16] if launched else None
    print(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1])
