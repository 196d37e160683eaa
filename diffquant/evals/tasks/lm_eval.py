"""Tasks of lm-eval as tasks of ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.evals.columns import ITEMS
from diffquant.evals.task import LIMIT, Task, TaskOption, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.evals.language_model import LanguageModel, States

TRUST_TASK = TaskOption(
    "trust_task", False, "Let a task's YAML file that is not lm-eval's run code in its templates and functions.", bool
)


@register
@dataclass(frozen=True, kw_only=True)
class Harness(Task):
    """A task of lm-eval.

    Attributes:
        task: name that lm-eval knows, or path of the YAML file of a task or a group of tasks.
        limit: number of items of each subtask; None for all.
    """

    kind: ClassVar = "lm-eval"
    usage: ClassVar = "lm-eval:NAME"
    options: ClassVar = (LIMIT, TRUST_TASK)
    columns: ClassVar = ITEMS

    task: str
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.evals.protocols.harness import require_lm_eval, require_trust

        _, _, task = name.partition(":")
        if not task:
            raise cls.misread(name)
        require_lm_eval()
        require_trust(task, bool(TRUST_TASK.of(values)))
        return cls(task=task, limit=at_least_one(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.task}"

    def identity(self) -> JsonObject:
        from diffquant.evals.protocols.harness import task_identity

        return {"name": self.name, "limit": self.limit, "batch_tokens": self.batch_tokens} | task_identity(self.task)

    def unseen(self) -> list[str]:
        from diffquant.evals.protocols.harness import unseen

        return unseen(self.task)

    def run(self, model: "LanguageModel", reference: "States | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from diffquant.evals.protocols.harness import run_task

        return run_task(model, self.task, self.limit, self.batch_tokens, progress)
