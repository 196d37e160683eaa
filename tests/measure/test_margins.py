"""What HellaSwag tells beside the choice: margins, and KL over the right endings."""

from dataclasses import astuple

import pytest
import torch
from scipy.stats import t
from torch.nn.functional import kl_div

from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.protocols import hellaswag
from diffquant.measure.results import ITEMS as ITEMS_COLUMNS
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.outputs import summarize_findings
from diffquant.measure.sweep.plot import list_panel_rows
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks.hellaswag import KL, MARGIN, MARGINS
from diffquant.measure.torch_model import TorchModel
from tests.support import tiny_lm

ITEMS = hellaswag.load_items(limit=9)


class WholeSequences(TorchModel):
    """A model whose prefixes must not be shared."""

    can_share_prefixes = False


class SequencesOfOneLength(WholeSequences):
    """A model that takes no padding either."""

    can_take_padding = False


def ending_logprobs(model, item):
    """Next-token log-probabilities [T, V] over each ending, each in a pass of its own, and the ending's tokens."""
    encoder = RequestEncoder(tiny_lm.tokenizer(), 512, tiny_lm.WORDS)
    for ending in item.endings:
        request = encoder.encode_request(item.query, f" {ending}")
        logits = model(torch.tensor([request.context + request.continuation])).logits[0]
        yield logits.log_softmax(-1)[len(request.context) - 1 : -1], torch.tensor(request.continuation)


@pytest.mark.parametrize("wrapper", [TorchModel, WholeSequences, SequencesOfOneLength])
@pytest.mark.parametrize("batch_tokens", [1, 700], ids=["one", "many"])
def test_kl_and_margins_are_those_of_each_ending_run_alone(wrapper, batch_tokens):
    model, other, tokenizer = tiny_lm.llama(), tiny_lm.llama(seed=1), tiny_lm.tokenizer()
    reference = hellaswag.compute_reference(TorchModel(model, tokenizer), ITEMS, 4096)
    outcome = hellaswag.evaluate_hellaswag(wrapper(other, tokenizer), ITEMS, batch_tokens, reference=reference)
    for number, item in enumerate(ITEMS):
        of_reference, of_other = ([*ending_logprobs(m, item)] for m in (model, other))
        (p, right), (q, _) = of_reference[item.label], of_other[item.label]
        assert outcome.details["tokens_by_item"][number] == len(right)
        expected = kl_div(q, p, reduction="batchmean", log_target=True).item()
        assert outcome.details["kl_by_item"][number] == pytest.approx(expected, rel=1e-4)
        scores = [
            each.gather(1, tokens[:, None]).sum().item() / len(ending)
            for (each, tokens), ending in zip(of_other, item.endings, strict=True)
        ]
        best_wrong = max(score for index, score in enumerate(scores) if index != item.label)
        assert outcome.details["margins"][number] == pytest.approx(scores[item.label] - best_wrong, abs=1e-5)


def result(margins, **details):
    return TaskResult(metric="acc_norm", score=0.5, n=len(margins), details={"margins": margins} | details)


def test_the_change_of_the_margin_is_paired_with_students_interval():
    now, before = [0.01, -0.02, 0.04, 0.00], [0.02, -0.015, 0.04, 0.03]
    change = MARGIN.estimate(result(now), result(before))
    differences = 100 * (torch.tensor(now, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64))
    expected = t.interval(0.95, 3, differences.mean().item(), (differences.std() / 2).item())
    assert astuple(change) == pytest.approx((differences.mean().item(), *expected))
    assert MARGIN.estimate(result(now), None) is None
    assert MARGIN.estimate(None, result(before)) is None


def test_kl_is_a_mean_over_tokens():
    measured = result([0.1] * 3, kl_by_item=[0.1, 0.4, 0.2], tokens_by_item=[10, 30, 20])
    assert KL.estimate(measured, None).mean == pytest.approx((1 + 12 + 4) / 60)
    assert KL.estimate(result([0.1]), None) is None


def test_items_without_choices_flip_too_and_means_over_draws_do_not():
    now, before = (TaskResult(metric="retrieved", score=0.5, n=3, values=values) for values in ([1, 0, 0], [0, 1, 1]))
    assert ITEMS_COLUMNS.metrics[-1].text(now, before) == "+1 -2"
    drawn = TaskResult(metric="acc", score=0.5, n=3, values=[0.5, 0, 1])
    assert ITEMS_COLUMNS.metrics[-1].text(drawn, drawn) == "-"


def test_a_sweep_leads_with_what_resolves_and_has_the_accuracy_beside_it(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    options = SweepOptions(bits=(3,), granularities=("tensor",), task_options={"limit": len(ITEMS)}, dtype="float32")
    sweep = run_sweep([model], options, tmp_path / "out")
    sweep.require_complete()
    head = sweep.table().splitlines()[0]
    assert head.index("KL [95 %]") < head.index("margin [95 %]") < head.index("acc_norm") < head.index("flips")
    assert [band.metric.label for band in list_panel_rows(sweep)] == [
        *(c.label for c in MARGINS.change_metrics),
        "score, %",
    ]
    (told,) = summarize_findings(sweep)
    assert told.startswith(f"hellaswag: {len(ITEMS)} items cannot show a loss below")
    assert "KL shows a change in 1 of 1 configurations" in told
    places = [told.index(part) for part in (", KL ", ", margin ", " nats per 100 characters, ", " points [")]
    assert places == sorted(places)
    baseline, quantized = json_rows(sweep)
    assert baseline["hellaswag kl"] is None
    assert quantized["hellaswag kl_low"] < quantized["hellaswag kl"] < quantized["hellaswag kl_high"]
    assert quantized["hellaswag margin_change"] == pytest.approx(
        quantized["hellaswag margin"] - baseline["hellaswag margin"]
    )
    assert "2 differences from 16 bits are compared" in sweep.table()
