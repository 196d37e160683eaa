"""Many-shot in-context classification as a task."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import UsageError
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.stats import standard_error
from diffquant.measure.task import LIMIT, Draw, Task, TaskOption, read_positive_option
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress
from examples.shots.plot import plot_shots

if TYPE_CHECKING:
    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from examples.shots.labelled import Dataset
    from examples.shots.protocol import ManyShotPlan

_NAME = re.compile(r"many-shot:(all|[0-9]{1,9})(?::([0-9]{1,9}))?")
_TRAIN = TaskOption[Path | None](
    "train", None, "Labelled texts for many-shot: .jsonl, .csv, .tsv, .label, .json.", Path
)
_TEST = TaskOption[Path | None](
    "test", None, "Texts that many-shot asks about; Clinc150 has them in the file of `train`.", Path
)
_FINE = TaskOption("fine", False, "TREC's fine labels in place of its coarse ones.", bool)


@dataclass(frozen=True, kw_only=True)
class ManyShot(Task):
    """Classification after demonstrations; where as many as fit are shown, their number depends on the tokenizer.

    Attributes:
        data: examples to show and to ask for.
        plan: plan of the prompts.
        limit: number of texts that are asked for; None for all.
    """

    kind: ClassVar = "many-shot"
    usage: ClassVar = "many-shot:SHOTS[:DRAWS]"
    options: ClassVar = (LIMIT, _TRAIN, _TEST, _FINE)
    columns: ClassVar = ITEMS
    plots: ClassVar[Mapping[str, Draw]] = {"shots.png": plot_shots}

    data: "Dataset"
    plan: "ManyShotPlan"
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from examples.shots.protocol import ManyShotPlan

        parts = _NAME.fullmatch(name)
        if parts is None:
            raise cls.make_name_error(name, "many-shot:48 or :all:5")
        shots, draws = parts.groups(default="1")
        plan = ManyShotPlan(None if shots == "all" else int(shots), int(draws))
        return cls.of_plan(name, plan, values, batch_tokens)

    @classmethod
    def of_plan(cls, name: str, plan: "ManyShotPlan", values: Mapping[str, object], batch_tokens: int) -> Self:
        """The task of a plan, its data read."""
        from examples.shots.labelled import load_dataset

        train = _TRAIN.value_in(values)
        if train is None:
            raise UsageError(f"{name} needs labelled texts: give {option_name('train')} and {option_name('test')}")
        data = load_dataset(train, _TEST.value_in(values), _FINE.value_in(values))
        plan.check(data)
        return cls(data=data, plan=plan, limit=read_positive_option(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.plan.shots or 'all'}:{self.plan.draws}"

    def identity(self) -> JsonObject:
        from examples.shots.labelled import examples_digest
        from examples.shots.protocol import PROMPT_FORMAT

        return {
            "name": self.name,
            "prompts": PROMPT_FORMAT,
            "train": examples_digest(self.data.train),
            "test": examples_digest(self.data.test),
            "seed": self.plan.seed,
            "limit": self.limit,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from examples.shots import protocol

        outcome = protocol.evaluate_many_shot(model, self.data, self.plan, self.limit, self.batch_tokens, progress)
        acc = sum(outcome.correct) / len(outcome.correct)
        # With several draws an item has several answers, so it cannot flip.
        one_draw = self.plan.draws == 1
        by_draw: JsonObject = {} if one_draw else {"choices_by_draw": outcome.choices}
        return TaskResult(
            metric="acc",
            score=acc,
            n=len(outcome.correct),
            values=[int(right) for right in outcome.correct] if one_draw else outcome.correct,
            choices=outcome.choices[0] if one_draw else None,
            details=by_draw
            | {
                "acc": acc,
                "acc_se": standard_error(outcome.correct),
                "labels": outcome.right,
                "classes": list(outcome.labels),
                "shots": outcome.shots,
                "tokens": outcome.tokens,
                "by_draw": outcome.by_draw,
            },
        )
