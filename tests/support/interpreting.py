"""Triton's interpreter without what it does for nothing, which is most of its time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def without_waste() -> None:
    """Have the interpreter of this process leave out work whose results it drops, or had before.

    It looks for overflow in each sum and product of integers, and asserts what it found only where it debugs. For each
    helper that a kernel calls it also looks for functions of the language to replace, once a launch would do. Types,
    and shapes as the language has them, it makes anew for each value.
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
    _remember_types(interpreter, tl.core, interpreter.interpreter_semantic)


def _remember_types(interpreter: Any, core: Any, semantic: Any) -> None:
    """Have values share their types and shapes, which are made anew for each of them otherwise."""
    shapes: dict[str, tuple[Any, Any]] = {}
    make_tensor = core.tensor.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[type.name]
        else:
            make_tensor(self, handle, type)
            shapes[type.name] = self.numel, self.shape

    core.tensor.__init__ = tensor
    core.block_type.with_element_ty = _remembered(core.block_type.with_element_ty)
    semantic.computation_type_impl = _remembered(semantic.computation_type_impl)
    vars(interpreter).update(_get_np_dtype=_remembered(interpreter._get_np_dtype))


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types, which go by their names, and of flags."""
    results: dict[tuple[Any, ...], Any] = {}

    def remembered(*arguments: Any) -> Any:
        key = tuple(each if isinstance(each, bool) else each.name for each in arguments)
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return remembered
