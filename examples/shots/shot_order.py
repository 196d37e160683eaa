"""Robustness of in-context classification to the order of its demonstrations, as a task."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.measure.results import TaskResult
from diffquant.measure.task import Draw
from diffquant.support.progress import Progress
from examples.shots.many_shot import ManyShot
from examples.shots.order_columns import ORDERS

if TYPE_CHECKING:
    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from examples.shots.protocol import OrderPlan

_NAME = re.compile(r"shot-order:([0-9]{1,9})(?::([0-9]{1,9}))?(:alternate)?")
# The paper sweeps as many seeds.
_ORDERS = "10"


@dataclass(frozen=True, kw_only=True)
class ShotOrder(ManyShot):
    """Classification after one set of demonstrations in several orders, randomly arranged or alternately by class.

    Source: arXiv 2410.05258, section 3.5 (figure 7): the margin between the best and the worst order.
    """

    kind: ClassVar = "shot-order"
    usage: ClassVar = "shot-order:SHOTS[:ORDERS][:alternate]"
    columns: ClassVar = ORDERS
    plots: ClassVar[Mapping[str, Draw]] = {}

    plan: "OrderPlan"

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from examples.shots.protocol import OrderPlan

        parts = _NAME.fullmatch(name)
        if parts is None:
            raise cls.make_name_error(name, "shot-order:48:10 or shot-order:48:10:alternate")
        shots, orders, alternate = parts.groups()
        plan = OrderPlan(int(shots), int(orders or _ORDERS), alternates=alternate is not None)
        return cls.of_plan(name, plan, values, batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.plan.shots}:{self.plan.draws}" + (":alternate" if self.plan.alternates else "")

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:
        result = super().run(model, reference, progress)
        details = {name: value for name, value in result.details.items() if name not in ("by_draw", "choices_by_draw")}
        by_order = result.details["by_draw"]
        best, worst = max(by_order), min(by_order)
        told = {"by_order": by_order, "best": best, "worst": worst, "spread": best - worst}
        choices = result.details.get("choices_by_draw")
        return replace(result, details=details | told | ({"choices_by_order": choices} if choices else {}))
