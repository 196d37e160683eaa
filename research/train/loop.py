"""Training loop: float32 master weights, a step that depends on its number alone, checkpoints to resume from."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffquant.errors import NonFiniteError, UsageError
from diffquant.model.modeling import DiffTransformer
from diffquant.support.progress import Progress, report_nothing
from research.train.settings import Schedule

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


class Batches(Protocol):
    """Training data, of which a batch depends on its arguments alone."""

    tokenizer: Any

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids [rows, length + 1] and the weight [rows, length] of each predicted token."""

    def describe(self) -> dict[str, int]:
        """Sizes of the data, for the run's record."""


class Trainer:
    """Trains a model in place.

    The model computes in its own dtype; the optimizer works on float32 copies, which alone are kept
    from step to step.
    """

    def __init__(
        self,
        model: DiffTransformer,
        schedule: Schedule,
        compiled: bool,
        objective: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Start at step 0.

        Args:
            objective: differentiable loss of ids [rows, length + 1] and weights [rows, length], in place of the model's
                own forward pass and cross entropy.
        """
        self.model = model
        self._objective = objective or self._loss
        self.schedule = schedule
        self.step = 0
        self._live = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in self._live]
        self._optimizer = torch.optim.AdamW(self._groups(), lr=schedule.rate, betas=schedule.betas, fused=True)
        self._forward: Callable[..., Any] = torch.compile(model) if compiled else model

    def train(
        self,
        batches: Batches,
        folder: Path,
        until: int | None = None,
        every: int = 100,
        progress: Progress = report_nothing,
    ) -> None:
        """Train to step `until`, or the end, with a line in the log and a checkpoint every `every` steps.

        Raises:
            NonFiniteError: the loss is not finite; the last checkpoint is kept.
        """
        end = self.schedule.steps if until is None else min(until, self.schedule.steps)
        started, tokens, losses = time.monotonic(), 0, []
        while self.step < end:
            loss, read = self._advance(batches)
            losses.append(loss)
            tokens += read
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss at step {self.step} is {loss}; lower the learning rate")
            progress(self.step, end, f"loss {loss:.3f}")
            if self.step % every == 0 or self.step == end:
                self._log(folder, losses, tokens / (time.monotonic() - started))
                self.save(folder)
                started, tokens, losses = time.monotonic(), 0, []

    def save(self, folder: Path) -> None:
        """Write the checkpoint atomically."""
        temporary = folder / (CHECKPOINT + ".tmp")
        state = {"step": self.step, "masters": self._masters, "optimizer": self._optimizer.state_dict()}
        torch.save(state, temporary)
        os.replace(temporary, folder / CHECKPOINT)

    def resume(self, folder: Path) -> bool:
        """Go on from the folder's checkpoint; returns whether there is one.

        Raises:
            UsageError: the checkpoint is another model's.
        """
        if not (folder / CHECKPOINT).exists():
            return False
        state = torch.load(folder / CHECKPOINT, weights_only=True)
        if [m.shape for m in state["masters"]] != [m.shape for m in self._masters]:
            raise UsageError(f"{folder / CHECKPOINT} is of a model of other sizes; choose another output")
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._refresh()
        return True

    def _advance(self, batches: Batches) -> tuple[float, int]:
        """Make one optimizer step; returns its loss and the number of tokens it read."""
        plan = self.schedule
        length = plan.length(self.step)
        rows = max(1, plan.tokens // length)
        loss = 0.0
        for part in range(plan.accumulate):
            ids, weights = batches.batch(plan.seed, self.step * plan.accumulate + part, rows, length)
            loss += self._backward(ids.to(self.model.device), weights.to(self.model.device))
        torch.nn.utils.clip_grads_with_norm_(
            self._masters, plan.clip, torch.nn.utils.get_total_norm([m.grad for m in self._masters])
        )
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate(self.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._refresh()
        self.step += 1
        return loss, plan.accumulate * rows * length

    def _backward(self, ids: Tensor, weights: Tensor) -> float:
        """Add a micro-batch's gradients to the masters'; returns its loss."""
        loss = self._differentiate(ids, weights / self.schedule.accumulate)
        for master, live in zip(self._masters, self._live, strict=True):
            gradient = live.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            live.grad = None
        return loss

    def _differentiate(self, ids: Tensor, weights: Tensor) -> float:
        """Leave a micro-batch's gradients in the model; returns its loss."""
        loss = self._objective(ids, weights)
        loss.backward()
        return loss.item()

    def _loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        logits = self._forward(ids[:, :-1], use_cache=False).logits
        losses = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (losses * weights.flatten()).sum()

    @torch.no_grad()
    def _refresh(self) -> None:
        for master, live in zip(self._masters, self._live, strict=True):
            live.copy_(master)

    def _groups(self) -> list[dict[str, Any]]:
        matrices = [m for m in self._masters if m.dim() > 1]
        vectors = [m for m in self._masters if m.dim() <= 1]
        return [{"params": matrices, "weight_decay": self.schedule.decay}, {"params": vectors, "weight_decay": 0.0}]

    def _log(self, folder: Path, losses: list[float], speed: float) -> None:
        entry = {
            "step": self.step,
            "loss": round(sum(losses) / len(losses), 5),
            "rate": round(self.schedule.learning_rate(self.step - 1), 8),
            "length": self.schedule.length(self.step - 1),
            "tokens_per_second": round(speed),
        }
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
