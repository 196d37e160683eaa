"""Triton's interpreter without what it does for nothing, which is most of its time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def without_waste() -> None:
    """Have the interpreter of this process leave out work whose results it drops.

    It looks for overflow in each sum and product of integers, and asserts what it found only where it debugs. For each
    helper that a kernel calls it also looks for functions of the language to replace, once a launch would do.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    replace_functions = interpreter._patch_lang

    class Launch(interpreter.GridExecutor):
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            replaced: set[frozenset[Any]] = set()

            def once(function: Callable[..., Any]) -> Any:
                seen = frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)
                if seen in replaced:
                    return None
                replaced.add(seen)
                return replace_functions(function)

            vars(interpreter).update(_patch_lang=once)
            try:
                return super().__call__(*arguments, **named)
            finally:
                vars(interpreter).update(_patch_lang=replace_functions)

    vars(interpreter).update(GridExecutor=Launch)
