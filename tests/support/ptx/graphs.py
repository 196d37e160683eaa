"""CUDA graphs by a model of their order: launches and torch's operations between them, again on the same addresses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_capturing: list["Graph"] = []


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Run what was captured, in its order."""
        for call in self.calls:
            call()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            # Nothing runs while it is captured.
            self.graph.calls.append(lambda: func(*args, **kwargs))
            return args[0] if func._schema.returns else None
        out = func(*args, **kwargs)
        if not any(returned.alias_info is not None for returned in func._schema.returns):
            self.graph.calls.append(lambda: self._again(func, args, kwargs, tree_leaves(out)))
        return out

    def _again(self, func: Any, args: Any, kwargs: Any, outs: list[Any]) -> None:
        for old, new in zip(outs, tree_leaves(func(*args, **kwargs)), strict=True):
            old.copy_(new)


@contextmanager
def capture(graph: Graph, **_: object) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    _capturing.append(graph)
    try:
        with _Capture(graph):
            yield
    finally:
        _capturing.pop()


def captured(launch: Callable[[], None]) -> bool:
    """Whether a launch belongs to a graph, to which it is added; else it runs now."""
    if _capturing:
        _capturing[-1].calls.append(launch)
    return bool(_capturing)
