"""Collects inputs of a layer's linear modules and their second moments, and stores activations between layers."""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from diffquant.checkpoints.placement import move_to_compute_device
from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel
from diffquant.model.walk import LayerRunner
from diffquant.support.machine import available_memory

State = TypeVar("State")

# Modules whose weight is used without calling the module -> modules that are called with the same input.
_READ_WITH = {
    "self_attn.lambda_proj": {"self_attn.q_proj", "self_attn.wq_a"},
    "moe.router.gate": {"moe.shared_experts.gate_proj"},
}


@dataclass(eq=False)
class SecondMoments:
    """Second moments of a module's input X [N, in] of N tokens, summed over batches.

    Attributes:
        products: XᵀX [in, in].
        lost: (Y - X)ᵀX [in, in], where Y [N, in] is the module's input in the 16-bit model; or None if not measured.
    """

    products: Tensor = field(default_factory=lambda: torch.zeros(()))
    lost: Tensor | None = None

    def add(self, x: Tensor, exact: Tensor | None = None) -> None:
        """Add a batch's input x [N, in] and, if given, the module's input `exact` [N, in] in the 16-bit model."""
        self.products = self.products + x.mT @ x
        if exact is not None:
            lost = (exact - x).mT @ x
            self.lost = lost if self.lost is None else self.lost + lost


def iterate_grouped_layers(model: CausalModel, ids: Tensor) -> Iterator[tuple[Any, list[list[str]]]]:
    """Yield a model's layers in order, each with its linear modules grouped by their input, as in `group_by_input`.

    A layer's parameters are on the computing device until the next layer is asked for.

    Args:
        ids: token ids [N, T]; a run on two of them shows the groups.
    """
    runner = model.new_layer_runner(2)
    state = runner.embed(ids[:1, :2])
    for layer in runner.layers:
        with move_to_compute_device(layer):
            groups, state = group_by_input(runner, layer, state)
            yield layer, groups


def group_by_input(runner: LayerRunner[State], layer: nn.Module, state: State) -> tuple[list[list[str]], State]:
    """Run a layer on its input `state`, and group its linear modules by their input.

    Returns:
        Names of the modules that share each input, in the order of their calls; and the layer's output.
    """
    called: list[tuple[str, Tensor]] = []
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    with _hooks(layer, names, lambda name, x: called.append((name, x))):
        state = runner.run_layer(layer, state)
    readers: dict[int, list[str]] = {}
    for name, x in called:
        readers.setdefault(id(x), []).append(name)
    for name, called_with in _READ_WITH.items():
        if name in names:
            next(each for each in readers.values() if called_with & set(each)).append(name)
    return list(readers.values()), state


def collect_inputs(
    runner: LayerRunner[State], layer: nn.Module, modules: Sequence[str], state: State
) -> tuple[Mapping[str, Tensor], State]:
    """Run a layer on its input `state`; return the inputs of some modules by name, and the layer's output.

    An input has shape [N, in] for the N tokens of `state`.
    """
    seen: dict[str, Tensor] = {}
    with _hooks(layer, modules, lambda name, x: seen.update({name: x.flatten(0, -2)})):
        return seen, runner.run_layer(layer, state)


def capture_input(runner: LayerRunner[State], layer: nn.Module, module: str, state: State) -> Tensor:
    """Run a layer on its input `state` only up to a module, and return the module's input [N, in] for N tokens."""
    seen: list[Tensor] = []

    def stop(_name: str, x: Tensor) -> None:
        seen.append(x.flatten(0, -2))
        raise _Reached

    try:
        with _hooks(layer, [module], stop):
            runner.run_layer(layer, state)
    except _Reached:
        pass
    return seen[0]


class _Reached(Exception):
    """The module was called."""


@contextmanager
def _hooks(layer: nn.Module, modules: Sequence[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the context, call `see` with a module's name and input before each of the given modules runs."""
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class StoredActivations(Generic[State]):
    """A batch's activations, in memory or in a file; memory or file is freed when this object is garbage-collected."""

    def __init__(self, state: State | None, file: Path | None) -> None:
        self._state, self._file = state, file

    def get(self) -> State:
        return cast(State, self._state if self._file is None else torch.load(self._file, weights_only=False))


class ActivationStore:
    """Keeps activations in memory up to a budget, and the rest in a temporary folder."""

    def __init__(self, budget: int | None = None) -> None:
        """Create an empty store.

        Args:
            budget: bytes of memory; by default half of the memory that is free now.
        """
        self.free = available_memory() // 2 if budget is None else budget
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = count()

    def keep(self, state: State) -> StoredActivations[State]:
        """Keep a batch's activations in memory, or on disk if they exceed the budget.

        Raises:
            UsageError: they do not fit on the disk either.
        """
        if (held := self._keep_if_fits(state, self.free)) is not None:
            return held
        # /tmp may be a tmpfs in memory; /var/tmp is on disk.
        place = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
        try:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="diffquant-", dir=place)
            file = Path(self._folder.name, f"{next(self._numbers)}.pt")
            torch.save(state, file)
        except (OSError, RuntimeError) as error:
            raise UsageError(
                f"the text's activations do not fit into {place or tempfile.gettempdir()} ({error}); set TMPDIR to a "
                "folder on a larger disk, or read fewer tokens"
            ) from error
        kept = StoredActivations[State](None, file)
        weakref.finalize(kept, file.unlink, missing_ok=True)
        return kept

    def keep_in_memory(self, state: State) -> StoredActivations[State] | None:
        """Keep a batch's activations in memory; return None if they need more than half of the remaining budget."""
        return self._keep_if_fits(state, self.free // 2)

    def _keep_if_fits(self, state: State, most: int) -> StoredActivations[State] | None:
        size = sum(tensor.nbytes for tensor in _tensors(state))
        if size > most:
            return None
        self.free -= size
        kept = StoredActivations(state, None)
        weakref.finalize(kept, self._give_back, size)
        return kept

    def _give_back(self, size: int) -> None:
        self.free += size


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors in a state: a tensor, or a nested mapping, sequence or dataclass of tensors."""
    if isinstance(state, Tensor):
        yield state
    elif is_dataclass(state):
        yield from _tensors(tuple(getattr(state, field.name) for field in fields(state)))
    elif isinstance(state, dict | tuple | list):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _tensors(each)
