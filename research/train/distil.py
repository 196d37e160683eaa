"""Distillation: gradients of a model whose head does not train, with vocabulary logits of a few tokens at a time."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from diffquant.measure.scoring import next_token_kl
from diffquant.model.modeling import DiffTransformer
from research.train.loop import Batches, Trainer
from research.train.settings import Schedule

# Tokens whose logits exist at once: 0.8 GB in float32 for a vocabulary of 49,152.
_TOKENS = 4096
_TIMED = 3


class Objective:
    """Two losses of a model, and their gradients.

    Args:
        model: model that trains, but for its head.
        teacher: model that distillation follows.
        compiled: whether layers and losses are compiled, from now on and for every use of the two models.
    """

    def __init__(self, model: DiffTransformer, teacher: DiffTransformer, compiled: bool) -> None:
        compiler: Callable[..., Callable[..., Tensor]] = torch.compile if compiled else lambda function: function
        if compiled:
            # A layer, not a model of thirty: one graph serves all layers of a kind.
            for layer in (*model.model.layers, *teacher.model.layers):
                layer.compile()
        self._parameters, self.device = list(model.parameters()), model.device
        self._heads = model.lm_head.weight, teacher.lm_head.weight
        self._model, self._teacher = model.model, teacher.model
        self._text_loss, self._distance = compiler(_text_loss), compiler(_distance)

    def differentiate(self, ids: Tensor, weights: Tensor, distil: bool) -> float:
        """Leave a micro-batch's gradients in the model; returns its loss.

        Args:
            ids: token ids [B, T + 1].
            weights: weight [B, T] of each predicted token.
            distil: whether the loss is KL(teacher ‖ model) and not the text's.
        """
        head, teacher_head = self._heads
        hidden = self._states(self._model, ids)
        rows = [part.detach().requires_grad_() for part in hidden.split(_TOKENS)]
        targets, weighed = ids[:, 1:].flatten().split(_TOKENS), weights.flatten().split(_TOKENS)
        if distil:
            with torch.no_grad():
                followed = self._states(self._teacher, ids).split(_TOKENS)
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

    def seconds(self, batches: Batches, schedule: Schedule, distil: bool) -> float:
        """Seconds that a step's gradients take once everything is compiled; no gradients are left."""
        length = schedule.longest
        ids, weights = batches.batch(schedule.seed, 0, max(1, schedule.tokens // length), length)
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
        """Hidden states [B·T, D] of all tokens but the last."""
        return model(ids[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)


class Continuation(Trainer):
    """Trains those parameters of a model that require gradients, first to follow the teacher, then on the text.

    Args:
        distil: share of the steps that follow the teacher.
    """

    def __init__(self, model: DiffTransformer, schedule: Schedule, objective: Objective, distil: float) -> None:
        super().__init__(model, schedule, compiled=False)
        self._objective = objective
        self._distilled = round(distil * schedule.steps)

    @property
    def trained(self) -> dict[str, Tensor]:
        """Weights that train, float32 by name."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self._masters, strict=True))

    def _differentiate(self, ids: Tensor, weights: Tensor) -> float:
        return self._objective.differentiate(ids, weights, self.step < self._distilled)


def _text_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(linear(hidden, head).float(), targets, reduction="none") * weights).sum()


def _distance(hidden: Tensor, head: Tensor, followed: Tensor, teacher_head: Tensor, weights: Tensor) -> Tensor:
    kl = next_token_kl(linear(followed, teacher_head).float(), linear(hidden, head).float())
    return (kl * weights).sum()
