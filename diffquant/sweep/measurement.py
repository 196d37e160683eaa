"""Measurements, the content of cells: a task's result with the run's time and sizes. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

_OWN = ("seconds", "logit_report", "stored", "commit")


@dataclass(frozen=True)
class Measurement:
    """A task's result under a recipe.

    Attributes:
        result: result of the task.
        seconds: time that the task took.
        weight_bytes: size of the checkpoint that stores the recipe's weights.
        kv_bytes: size of a token in the recipe's cache, over all layers.
        logit_report: numbers about each layer's logit quantizer, or None if logits are not quantized.
        commit: commit of the code that measured it, with "+changes" if the sources differed from it; None if unknown.
    """

    result: TaskResult
    seconds: float
    weight_bytes: int
    kv_bytes: float
    logit_report: list[dict[str, float]] | None = None
    commit: str | None = None

    def to_dict(self) -> JsonObject:
        """The measurement as one flat object, the task's result included, which `from_dict` reads."""
        report = {} if self.logit_report is None else {"logit_report": self.logit_report}
        stored = {"weights": self.weight_bytes, "kv_per_token": self.kv_bytes}
        made = {} if self.commit is None else {"commit": self.commit}
        return self.result.to_dict() | {"seconds": self.seconds} | report | {"stored": stored} | made

    @classmethod
    def from_dict(cls, cell: Mapping[str, object]) -> Self:
        """The measurement that `to_dict` wrote.

        Raises:
            ValueError: it has another form.
        """
        own: JsonObject = {name: cell.get(name) for name in _OWN}
        stored, report, made = own["stored"], own["logit_report"], own["commit"]
        is_sound = (
            isinstance(own["seconds"], int | float)
            and isinstance(stored, dict)
            and all(isinstance(stored.get(name), int | float) for name in ("weights", "kv_per_token"))
            and isinstance(report, list | None)
            and isinstance(made, str | None)
        )
        if not is_sound:
            raise ValueError("a measurement needs seconds and stored sizes, with a list of logit reports if any")
        result = TaskResult.from_dict({name: value for name, value in cell.items() if name not in own})
        return cls(result, own["seconds"], stored["weights"], stored["kv_per_token"], report, made)
