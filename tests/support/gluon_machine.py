"""A machine that runs Gluon kernels for Hopper on the host: their own source, a thread for each partition of warps.

Triton has no interpreter for Gluon. This one runs a kernel's Python functions with stand-ins for Gluon's language:
tensors are torch's, layouts are ignored (converting one changes no value), barriers count arrivals and bytes and flip
their phases as the hardware's do, tensor descriptors fill with zeros what lies outside, and a product is computed when
it is waited for, from what shared memory holds by then. What is never brought reads as NaN or as the largest integer,
and a wait that would last forever is an error.

It shows what a kernel computes and that its barriers are in order. It does not show that machine code fits a device.
"""

import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 30.0


class Launcher:
    """A Gluon kernel that is launched as its launch code does it, and runs here."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
            pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
            for program in range(*grid):
                _Machine(program).function(self.kernel)(*pointers, **constants)

        return launch


class Pointer:
    """Pointers into the memory of a tensor: one, or a tensor of them."""

    def __init__(self, tensor: Tensor, offsets: Tensor | int = 0, *, memory: Tensor | None = None) -> None:
        # All of the storage from the tensor's first element on, so that strides reach whatever they reach.
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        self.memory = tensor.as_strided((size,), (1,)) if memory is None else memory
        self.offsets = torch.as_tensor(offsets)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)
        self._tensor = tensor

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self._tensor, self.offsets + offset, memory=self.memory)


class Descriptor:
    """A matrix in memory that tiles are brought from."""

    def __init__(self, base: Pointer, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[int]) -> None:
        self.base, self.block = int(base.offsets), tuple(block)
        self.memory = base.memory
        self.shape, self.strides = [int(x) for x in shape], [int(x) for x in strides]
        misplaced = [s for s in self.strides[:-1] if s * self.memory.element_size() % 16]
        if self.strides[-1] != 1 or misplaced or max(self.block) > 256:
            raise ValueError(f"no descriptor takes strides {strides} and blocks of {block}")

    def tile(self, at: Sequence[Any]) -> Tensor:
        """Tile [block] from a row and a column on, with zeros outside of the matrix."""
        row, column = (int(x) + torch.arange(n) for x, n in zip(at, self.block, strict=True))
        inside = ((row >= 0) & (row < self.shape[0]))[:, None] & ((column >= 0) & (column < self.shape[1]))[None, :]
        places = self.base + row[:, None] * self.strides[0] + column[None, :]
        tile = self.memory.view(_BITS[self.memory.element_size()])[torch.where(inside, places, 0)]
        return torch.where(inside, tile, 0).view(self.memory.dtype)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Shared:
    """A buffer in shared memory, or a part of one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def index(self, i: Any) -> "Shared":
        return Shared(self.tensor[int(i)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.tensor[start : start + length])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.tensor.permute(*order))


class Barrier:
    """A barrier whose phase ends after so many arrivals and all bytes that they announced."""

    def __init__(self, condition: threading.Condition) -> None:
        self.condition = condition
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, announced: int = 0) -> None:
        with self.condition:
            if self.pending == 0:
                raise RuntimeError("more arrivals than the barrier's phase has")
            self.bytes += announced
            self.pending -= 1
            self._end_phase()

    def bring(self, nbytes: int) -> None:
        with self.condition:
            self.bytes -= nbytes
            self._end_phase()

    def wait(self, parity: int) -> None:
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase % 2 != parity, _PATIENCE):
                raise TimeoutError(f"a barrier of {self.count} arrivals stays in phase {self.phase}")

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.condition.notify_all()


class Barriers:
    """Barriers [n, 1] in shared memory."""

    def __init__(self, barriers: Sequence[Barrier]) -> None:
        self.barriers = barriers

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class _Machine:
    """One program: its number, its barriers, its partitions, and the language they are written in."""

    def __init__(self, program: int) -> None:
        self.condition = threading.Condition()
        self.language = SimpleNamespace(
            program_id=lambda _axis: torch.tensor(program),
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
            **_LANGUAGE,
        )
        self.modules = {"gl": self.language, "mbarrier": _MBARRIER, "tma": _TMA, "_load": _load, **_FUNCTIONS}
        self.functions: dict[Any, FunctionType] = {}

    def function(self, jitted: Any) -> FunctionType:
        """A jitted function that calls stand-ins."""
        if jitted not in self.functions:
            names: dict[str, Any] = {}
            emulated = FunctionType(jitted.fn.__code__, names, argdefs=jitted.fn.__defaults__)
            self.functions[jitted] = emulated
            for name, value in jitted.fn.__globals__.items():
                names[name] = self.modules.get(name, self.substitute(value))
        return self.functions[jitted]

    def substitute(self, value: Any) -> Any:
        if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
            return self.function(value)
        return value.value if type(value).__name__ == "constexpr" else value

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared | Barriers:
        if layout is _BARRIER_LAYOUT:
            return Barriers([Barrier(self.condition) for _ in range(shape[0])])
        # Whoever reads before anything was brought sees it.
        filling = torch.iinfo(dtype).max if dtype in (torch.int8, torch.int64) else torch.nan
        return Shared(torch.full(tuple(shape), filling).to(dtype))

    def warp_specialize(self, partitions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *_: object) -> None:
        errors: list[BaseException] = []

        def work(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            try:
                with torch.no_grad():
                    function(*args)
            except BaseException as error:  # an error of any partition is one of the kernel
                errors.append(error)

        threads = [threading.Thread(target=work, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


_BARRIER_LAYOUT = object()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: _BARRIER_LAYOUT,
    init=_init,
    wait=lambda barrier, phase: barrier.wait(int(phase)),
    arrive=lambda barrier, count: [barrier.arrive() for _ in range(count)],
    expect=lambda barrier, nbytes: barrier.arrive(int(nbytes)),
)
_TMA = SimpleNamespace(
    make_tensor_descriptor=lambda base, shape, strides, block, _layout: Descriptor(base, shape, strides, block)
)


def _load(source: Descriptor, at: Sequence[Any], barrier: Barrier, target: Shared) -> None:
    tile = source.tile(at)
    target.tensor.copy_(tile)
    barrier.bring(tile.numel() * tile.element_size())


class Product:
    """A product that a partition asked for: computed, from what shared memory holds by then, when it is waited for."""

    def __init__(self, left: Any, right: Shared, total: Any, use_acc: bool) -> None:
        if isinstance(total, Product):
            raise RuntimeError("a product adds to one that nobody waited for")
        self.left, self.right, self.total, self.use_acc = left, right, total, use_acc

    def compute(self) -> Tensor:
        # Copied from shared memory as it is now; float64 holds products of codes and of halves exactly.
        a, b = (x.tensor if isinstance(x, Shared) else x for x in (self.left, self.right))
        product = a.double() @ b.double()
        return (product + (self.total if self.use_acc else 0)).to(self.total.dtype)


# Those of a thread that are under way, in the order in which they were asked for.
_under_way = threading.local()


def _product(left: Any, right: Shared, total: Any, *, use_acc: bool = True, is_async: bool) -> Product | Tensor:
    product = Product(left, right, total, use_acc)
    if not is_async:
        return product.compute()
    _under_way.products = [*_products(), product]
    return product


def _products() -> list[Product]:
    products: list[Product] = getattr(_under_way, "products", [])
    return products


def _wait(outstanding: int, deps: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
    products = _products()
    _under_way.products = products[len(products) - outstanding :] if outstanding else []
    if any(each is dep for each in _under_way.products for dep in deps):
        raise RuntimeError("a product is used that may still be under way")
    done = tuple(dep.compute() if isinstance(dep, Product) else dep for dep in deps)
    return done[0] if len(done) == 1 else done


_FUNCTIONS: dict[str, Any] = {
    "fence_async_shared": lambda: None,
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": _wait,
}


def _read(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    if mask is None:
        return pointer.memory[pointer.offsets]
    mask = mask.expand(pointer.offsets.shape)
    values = pointer.memory[torch.where(mask, pointer.offsets, 0)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def _write(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    mask = mask.expand(values.shape)
    pointer.memory[pointer.offsets.expand(values.shape)[mask]] = values[mask].to(pointer.memory.dtype)


def _larger(a: Any, b: Any, **_: object) -> Tensor:
    return torch.maximum(*_alike(a, b))


def _smaller(a: Any, b: Any, **_: object) -> Tensor:
    return torch.minimum(*_alike(a, b))


def _alike(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    dtype = torch.result_type(a, b)
    return a.to(dtype), b.to(dtype)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), *_alike(a, b))


_LANGUAGE: dict[str, Any] = {
    "constexpr": object,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8e4nv": torch.float8_e4m3fn,
    "NVMMASharedLayout": SimpleNamespace(get_default_for=lambda _shape, _dtype: None),
    "NVMMADistributedLayout": lambda *_: None,
    "SliceLayout": lambda *_: None,
    "DotOperandLayout": lambda *_: None,
    "static_range": range,
    "arange": lambda first, last, layout: torch.arange(first, last),
    "full": lambda shape, value, dtype, layout: torch.full(tuple(shape), value, dtype=dtype),
    "cdiv": lambda a, b: -(-a // b),
    "load": _read,
    "store": _write,
    "minimum": _smaller,
    "maximum": _larger,
    "where": _where,
    "max": lambda x, axis: x.amax(axis),
    "sum": lambda x, axis: x.sum(axis),
    # A product of two float32 is exact in float64.
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "div_rn": torch.div,
    "exp2": torch.exp2,
    "rsqrt": torch.rsqrt,
    "convert_layout": lambda x, _layout: x,
}
