"""Recordings of tensor operations on a CPU, which stand in for CUDA graphs.

As in a graph, what is recorded does not run, no Python runs when it is replayed, every address is the recorded one,
nothing that it reads is kept alive by it, and whatever would wait for the device is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from diffquant.kernels.cache import append, decode
from diffquant.model.graphed_steps import Recording

_UNKNOWN_BEFORE_IT_RAN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostRead(RuntimeError):
    """An operation whose result the host would have to wait for, or that brings something from there."""


class OtherDevice(AssertionError):
    """An operation on a device that is not recorded: it would run at once, and never again."""


class NoHostReads(TorchDispatchMode):
    """Refuses operations that no CUDA graph holds.

    Attributes:
        names: name of each operation that was let through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        by_mask = name.startswith("aten.index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:])
        )
        has_unknown_result = _UNKNOWN_BEFORE_IT_RAN & set(func.tags) and not name.startswith("aten.index")
        if by_mask or has_unknown_result or func is torch.ops.aten.lift_fresh.default:
            raise HostRead(f"{name} cannot be recorded")
        self.names.append(name)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _Recorder(NoHostReads):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        # Tensors of the recording itself, which a graph's own memory has.
        self._made: dict[int, Tensor] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        read = tree_map(self._by_address, (args, kwargs))
        if func._schema.is_mutable:
            self._check_device(func, args)
            self.calls.append((func, *read, []))
            return args[0] if func._schema.returns else None
        # Only for what the result looks like: its values are those of another step.
        out = func(*args, **kwargs)
        leaves = tree_leaves(out)
        self._check_device(func, leaves)
        self._made |= {id(x): x for x in leaves if isinstance(x, Tensor)}
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        self.calls.append((func, *read, [] if is_view else leaves))
        return out

    def _check_device(self, func: Any, values: Any) -> None:
        elsewhere = {x.device for x in tree_leaves(values) if isinstance(x, Tensor)} - {self._device}
        if elsewhere:
            raise OtherDevice(f"{func} computes on {elsewhere}, and {self._device} is recorded")

    def _by_address(self, x: Any) -> Any:
        return ref(x) if isinstance(x, Tensor) and id(x) not in self._made else x

    def replay(self) -> None:
        for func, args, kwargs, outs in self.calls:
            args, kwargs = tree_map(_still_there, (args, kwargs))
            for old, new in zip(outs, tree_leaves(func(*args, **kwargs)), strict=False):
                old.copy_(new)


def _still_there(x: Any) -> Any:
    if not isinstance(x, ref):
        return x
    tensor = x()
    assert tensor is not None, "a recording reads memory that was given back"
    return tensor


@contextmanager
def kernels_as_operators() -> Iterator[None]:
    """Where a step launches its cache's kernels, it calls operators, which can be recorded and take empty tensors."""
    launches = {module: module._launch for module in (append, decode)}
    for module in launches:
        vars(module)["_launch"] = module._op
    try:
        yield
    finally:
        for module, launch in launches.items():
            vars(module)["_launch"] = launch


def record(work: Callable[[], Tensor], device: torch.device) -> Recording:
    """What `diffquant.model.graphed_steps.record_cuda_graph` gives, without a GPU.

    Raises:
        HostRead: the work waits for the device.
        OtherDevice: it computes on another device, whose kernels a graph does not hold.
    """
    recorder = _Recorder(device)
    with kernels_as_operators(), recorder:
        result = work()
    return recorder.replay, result
