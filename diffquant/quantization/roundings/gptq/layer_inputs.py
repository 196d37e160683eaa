"""The inputs of a layer's linear modules: which of them read the same one, in which order, and its second moments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from diffquant.model.walk import Walk

State = TypeVar("State")

# A weight that is read without a call of its module, and modules of which one is called with the same input.
_READ_WITH = {
    "self_attn.lambda_proj": {"self_attn.q_proj", "self_attn.wq_a"},
    "moe.router.gate": {"moe.shared_experts.gate_proj"},
}


@dataclass(eq=False)
class Moments:
    """Second moments of an input X [N, in] of a layer, summed batch by batch.

    Attributes:
        products: XᵀX [in, in].
        lost: (Y - X)ᵀX [in, in] for the input Y that the 16-bit model has there; None if that is not looked at.
    """

    products: Tensor = field(default_factory=lambda: torch.zeros(()))
    lost: Tensor | None = None

    def add(self, x: Tensor, exact: Tensor | None = None) -> None:
        """Add a batch's input [N, in], and what the 16-bit model has in its place."""
        self.products = self.products + x.mT @ x
        if exact is not None:
            lost = (exact - x).mT @ x
            self.lost = lost if self.lost is None else self.lost + lost


def readers_by_input(walk: Walk[State], layer: nn.Module, state: State) -> tuple[list[list[str]], State]:
    """Names of a layer's linear modules, those that read the same input together, in the order of their run.

    Returns:
        The names, and the layer's output for `state`.
    """
    called: list[tuple[str, Tensor]] = []
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
    with _hooks(layer, names, lambda name, x: called.append((name, x))):
        state = walk.run(layer, state)
    readers: dict[int, list[str]] = {}
    for name, x in called:
        readers.setdefault(id(x), []).append(name)
    for name, called_with in _READ_WITH.items():
        if name in names:
            next(each for each in readers.values() if called_with & set(each)).append(name)
    return list(readers.values()), state


def inputs_on_the_way(
    walk: Walk[State], layer: nn.Module, modules: Sequence[str], state: State
) -> tuple[Mapping[str, Tensor], State]:
    """Inputs [N, in] of some modules by name, and the layer's output."""
    seen: dict[str, Tensor] = {}
    with _hooks(layer, modules, lambda name, x: seen.update({name: x.flatten(0, -2)})):
        return seen, walk.run(layer, state)


def input_of(walk: Walk[State], layer: nn.Module, module: str, state: State) -> Tensor:
    """Input [N, in] of a module; what the layer computes behind it is left out."""
    seen: list[Tensor] = []

    def stop(_name: str, x: Tensor) -> None:
        seen.append(x.flatten(0, -2))
        raise _Reached

    try:
        with _hooks(layer, [module], stop):
            walk.run(layer, state)
    except _Reached:
        pass
    return seen[0]


class _Reached(Exception):
    """The module was called."""


@contextmanager
def _hooks(layer: nn.Module, modules: Sequence[str], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Show `see` the name and the input of some modules before they run, while open."""
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
