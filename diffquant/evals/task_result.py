"""The result of a task. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from diffquant.support.plain_data import JsonObject


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of a task on a model.

    Attributes:
        metric: name of the task's main number.
        score: mean over the items, or None if the task has no items.
        n: number of items, or None if the task has none.
        values: score of each item, or None if unknown.
        choices: answer to each item, or None if an item has several.
        details: all other results as plain data, under names that the task chooses.
    """

    metric: str
    score: float | None = None
    n: int | None = None
    values: list[float] | None = None
    choices: list[int] | None = None
    details: JsonObject = field(default_factory=dict)

    def to_dict(self) -> JsonObject:
        """The result as one flat object, which `from_dict` reads."""
        scored = {} if self.score is None else {"score": self.score, "n": self.n, "values": self.values}
        chosen = {} if self.choices is None else {"choices": self.choices}
        return {"metric": self.metric} | scored | chosen | self.details

    @classmethod
    def from_dict(cls, stored: Mapping[str, object]) -> Self:
        """The result that `to_dict` wrote.

        Raises:
            ValueError: it has another form.
        """
        fields: JsonObject = {name: stored.get(name) for name in ("metric", "score", "n", "values", "choices")}
        is_sound = (
            isinstance(fields["metric"], str)
            and isinstance(fields["score"], int | float | None)
            and isinstance(fields["n"], int | None)
            and all(isinstance(fields[name], list | None) for name in ("values", "choices"))
        )
        if not is_sound:
            raise ValueError("a result needs the name of its metric, a number for its score, and lists of its items'")
        return cls(**fields, details={name: value for name, value in stored.items() if name not in fields})

    @property
    def shots(self) -> int | None:
        """Number of demonstrations in a prompt, or None if the task shows none."""
        return self.details.get("shots")
