"""Gradients of a language model whose head does not train: vocabulary logits exist a few rows at a time."""

import time
from collections.abc import Callable

import torch
from loop import Source, Trainer
from settings import Schedule
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from diffquant.evals.protocols.perplexity import next_token_kl
from diffquant.model.modeling import DiffTransformer

# Rows of logits at once: 0.8 GB in float32 for a vocabulary of 49,152.
_ROWS = 4096
_TIMED = 3


class Objective:
    """Two losses of a model, and their gradients.

    Args:
        model: it trains, but for its head.
        teacher: what distillation follows.
        compiled: whether to compile everything.
    """

    def __init__(self, model: DiffTransformer, teacher: DiffTransformer, compiled: bool) -> None:
        compiler: Callable[..., Callable[..., Tensor]] = torch.compile if compiled else lambda function: function
        self._parameters, self.device = list(model.parameters()), model.device
        self._heads = model.lm_head.weight, teacher.lm_head.weight
        self._model, self._teacher = compiler(model.model), compiler(teacher.model)
        self._text_loss, self._distance = compiler(_text_loss), compiler(_distance)

    def differentiate(self, ids: Tensor, weights: Tensor, distil: bool) -> float:
        """Leave a micro-batch's gradients in the model; its loss.

        Args:
            ids: [B, T + 1].
            weights: [B, T] of each predicted token.
            distil: the loss is KL(teacher ‖ model), not the text's.
        """
        head, teacher_head = self._heads
        hidden = self._states(self._model, ids)
        rows = [part.detach().requires_grad_() for part in hidden.split(_ROWS)]
        targets, weighed = ids[:, 1:].flatten().split(_ROWS), weights.flatten().split(_ROWS)
        if distil:
            with torch.no_grad():
                followed = self._states(self._teacher, ids).split(_ROWS)
            losses = (
                self._distance(r, head, f, teacher_head, w) for r, f, w in zip(rows, followed, weighed, strict=True)
            )
        else:
            losses = (self._text_loss(r, head, t, w) for r, t, w in zip(rows, targets, weighed, strict=True))
        total = torch.zeros((), device=self.device)
        for loss in losses:
            loss.backward()
            total += loss.detach()
        hidden.backward(torch.cat([row.grad for row in rows]))
        return float(total)

    def seconds(self, source: Source, schedule: Schedule, distil: bool) -> float:
        """Time of a step's gradients, measured after what compiles; none are left."""
        length = schedule.longest
        ids, weights = source.batch(schedule.seed, 0, max(1, schedule.tokens // length), length)
        ids, weights = ids.to(self.device), weights.to(self.device)
        self.differentiate(ids, weights, distil)
        started = time.monotonic()
        for _ in range(_TIMED):
            self.differentiate(ids, weights, distil)
        taken = time.monotonic() - started
        for parameter in self._parameters:
            parameter.grad = None
        return schedule.accumulate * taken / _TIMED

    def _states(self, model: Callable[..., Tensor], ids: Tensor) -> Tensor:
        """[B·T, D]"""
        return model(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)


class Continuation(Trainer):
    """Trains what of a model requires gradients, first to follow the teacher, then on the text.

    Args:
        distil: share of the steps that follow the teacher.
    """

    def __init__(self, model: DiffTransformer, schedule: Schedule, objective: Objective, distil: float) -> None:
        super().__init__(model, schedule, compiled=False)
        self._objective = objective
        self._distilled = round(distil * schedule.steps)

    @property
    def trained(self) -> dict[str, Tensor]:
        """float32 weights that train, by name."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self._masters, strict=True))

    def _differentiate(self, ids: Tensor, weights: Tensor) -> float:
        return self._objective.differentiate(ids, weights, self.step < self._distilled)


def _text_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(linear(hidden, head).float(), targets, reduction="none") * weights).sum()


def _distance(hidden: Tensor, head: Tensor, followed: Tensor, teacher_head: Tensor, weights: Tensor) -> Tensor:
    kl = next_token_kl(linear(followed, teacher_head).float(), linear(hidden, head).float())
    return (kl * weights).sum()
