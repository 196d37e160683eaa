"""A pytest plugin that runs the tests for a GPU without one, and counts the kernels Triton would compile for an H200.

Tensors are on torch's meta device, which computes shapes and nothing else. So a test launches what it would launch,
compares nothing, and fails where it needs a value after all. Each kernel is counted where Triton would compile it.
`-p tests.support.uncompiled` writes the counts as JSON to the file that DIFFQUANT_COUNTS names, by test file and then
by kernel; of a folder's files the first one that launches a kernel compiles it, since Triton's cache has it then. What
`torch.compile` would generate is not among them.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diffquant.family.call import AttentionCall

COUNTS = "DIFFQUANT_COUNTS"
# What meta tensors cannot say, and what the tests hear instead.
_ANSWERS = {"item": 0.0, "__float__": 0.0, "__int__": 0, "__index__": 0, "__bool__": True, "equal": True}
_keys: set[tuple[Path, str, str, str]] = set()
_counts: dict[str, Counter[str]] = defaultdict(Counter)
_running = Path()


class _OnMeta(TorchFunctionMode):
    """Puts on the meta device what is asked for on a CUDA device, and keeps it there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cpu" or (name == "to" and args[0].is_meta and "cpu" in map(str, args[1:])):
            return args[0]
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        if name == "cuda":
            return args[0].to("meta")
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            if name in _ANSWERS:
                return _ANSWERS[name]
            if name == "tolist":
                return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        generator = kwargs.pop("generator", None)
        if _is_cuda(getattr(generator, "asked_for", None)) or _is_cuda(kwargs.get("device")):
            kwargs["device"] = "meta"
        elif generator is not None:
            kwargs["generator"] = generator
        if name == "to":
            args = tuple("meta" if _is_cuda(x) else x for x in args)
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    """A random generator that may be asked for on any device, and draws on the host alone."""

    asked_for: object

    def __new__(cls, device: object = "cpu") -> "_Generator":
        made = super().__new__(cls)
        made.asked_for = device
        return made


class _Graph:
    """A CUDA graph that holds nothing."""

    def replay(self) -> None:
        pass


class _Driver:
    """As much of Triton's driver as is asked before anything is compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _count(*, key: str, fn: Any, **_: Any) -> bool:
    whole = (_running.parent, fn.module, fn.name, key)
    if whole not in _keys:
        _keys.add(whole)
        _counts[_running.name][fn.name] += 1
    # As if it were compiled already.
    return True


def _shape_of_output(call: AttentionCall) -> Tensor:
    """`naive` without its values."""
    return call.q[0].new_empty(*call.q[0].shape[:-1], call.v.shape[-1])


def _call_once(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """`interleaved` of the bench, which has nothing to time here."""
    for call in calls.values():
        call()
    return {name: [1.0] * repeats for name in calls}


def _as_functions(custom_op: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.library.custom_op` that leaves our ops plain functions: on meta tensors an op only computes a shape."""

    def declared(name: str, fn: Any = None, /, **options: Any) -> Any:
        if not name.startswith("diffquant::"):
            return custom_op(name, fn, **options)

        def plain(fn: Any) -> Any:
            fn.register_fake = lambda fake: fake
            return fn

        return plain if fn is None else plain(fn)

    return declared


def pytest_configure() -> None:
    import triton

    vars(torch.library).update(
        custom_op=_as_functions(torch.library.custom_op), opcheck=lambda op, arguments: op(*arguments)
    )
    from diffquant.bench import timing
    from diffquant.kernels import gpu

    vars(timing).update(prepare=lambda work, *_, **__: work, interleaved=_call_once)
    vars(gpu).update(_assumed=gpu.H200, device_refusal=lambda _: None)
    vars(torch.cuda).update(
        is_available=lambda: True,
        synchronize=lambda *_: None,
        get_device_capability=lambda *_: gpu.H200.capability,
        device_of=lambda *_: nullcontext(),
        set_sync_debug_mode=lambda *_: None,
        reset_peak_memory_stats=lambda *_: None,
        memory_allocated=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        CUDAGraph=_Graph,
        graph=lambda *_, **__: nullcontext(),
    )
    # The oracle, which takes longer than what it is held to.
    vars(import_module("diffquant.attention.naive")).update(naive=_shape_of_output)
    # What the meta device needs is imported while torch is whole.
    torch.randint(2, (2,), device="meta").to(torch.uint8) + 1
    vars(torch).update(Generator=_Generator, compile=lambda function, **_: function)
    vars(torch.testing).update(assert_close=lambda *_, **__: None)
    triton.runtime.driver.set_active(_Driver())
    triton.knobs.runtime.jit_cache_hook = _count
    _OnMeta().__enter__()


def pytest_runtest_setup(item: pytest.Item) -> None:
    global _running  # noqa: PLW0603
    _running = item.path


def pytest_sessionfinish() -> None:
    Path(os.environ[COUNTS]).write_text(json.dumps(_counts), encoding="utf-8")
