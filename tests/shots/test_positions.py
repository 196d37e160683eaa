"""Loss by place: cumulative NLL by position, AR-hits and other tokens apart."""

from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from diffquant import data
from diffquant.errors import NonFiniteError, UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.results import TaskResult
from diffquant.measure.stats import mean_interval
from diffquant.measure.sweep.grid import SweepOptions, list_points
from diffquant.measure.sweep.outputs import summarize_findings, write_outputs
from diffquant.measure.sweep.result import SweepResult, json_rows
from diffquant.measure.sweep.run import run_sweep
from diffquant.measure.tasks import make_tasks, task_class_named
from diffquant.measure.torch_model import TorchModel
from examples.shots.nll import POSITIONS, cumulative_means, find_repeated_bigrams, position_panels, score_positions
from tests.support import tiny_lm
from tests.support.tables import in_one_test

TEXT = data.books_text()[5000:5900]
WINDOW = 37


@in_one_test("batch_tokens", [1, 100, 5000])
def test_nll_is_that_of_each_window_run_alone(batch_tokens):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    tokens = [0, *tokenizer.encode(TEXT)]
    scored, _ = score_positions(TorchModel(model, tokenizer), TEXT, WINDOW, batch_tokens)
    assert scored.shape == ((len(tokens) - 1) // WINDOW, WINDOW)
    for number, nll in enumerate(scored):
        window = torch.tensor(tokens[number * WINDOW : (number + 1) * WINDOW + 1])
        expected = cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="none")
        torch.testing.assert_close(nll.float(), expected, rtol=1e-4, atol=1e-4)


def test_the_cumulative_average_is_the_mean_up_to_each_position():
    nll, _ = score_positions(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), TEXT, WINDOW)
    positions, means = cumulative_means(nll)
    assert positions == [1, 2, 4, 8, 16, 32, 37]
    for position, mean in zip(positions, means.T, strict=True):
        torch.testing.assert_close(mean, nll[:, :position].mean(1))


def test_a_hit_ends_a_bigram_that_stood_in_its_window_before():
    assert find_repeated_bigrams([5, 6, 7, 5, 6, 6, 6, 6]) == [False, False, False, True, False, True, True]
    tokens = [0, *tiny_lm.tokenizer().encode(TEXT)]
    _, is_hit = score_positions(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), TEXT, WINDOW)
    for number, hits in enumerate(is_hit.tolist()):
        window = tokens[number * WINDOW : (number + 1) * WINDOW + 1]
        for place in range(1, len(window)):
            before = [window[k - 1 : k + 1] for k in range(1, place)]
            assert hits[place - 1] == (window[place - 1 : place + 1] in before)
    assert 0 < is_hit.double().mean() < 1


def measured(seed, **options):
    (task,) = make_tasks(["nll"], {"characters": 900, "window": WINDOW} | options, 4096)
    return task.run(TorchModel(tiny_lm.llama(seed=seed), tiny_lm.tokenizer()), None, lambda *_: None)


def test_hits_and_others_together_are_all_tokens():
    details = measured(0).details
    hits, others = sum(details["ar_hits_by_window"]), sum(details["others_by_window"])
    assert hits + others == sum(details["tokens_by_window"])
    assert details["ar_hit_share"] == pytest.approx(hits / (hits + others))
    together = (hits * details["ar_hit_nll"] + others * details["other_nll"]) / (hits + others)
    assert details["nll"] == pytest.approx(together)
    assert details["cumulative_nll"][-1] == pytest.approx(details["nll"])


def test_changes_are_paired_over_windows_and_weigh_as_their_tokens():
    now, before = measured(1), measured(0)
    (all_, hit, other) = (change.estimate(now, before) for change in POSITIONS.change_metrics)
    differences = [
        a - b for a, b in zip(now.details["ar_hit_nll_by_window"], before.details["ar_hit_nll_by_window"], strict=True)
    ]
    expected = mean_interval(differences, now.details["ar_hits_by_window"])
    assert astuple(hit) == pytest.approx(astuple(expected))
    assert hit.mean == pytest.approx(now.details["ar_hit_nll"] - before.details["ar_hit_nll"])
    assert other.mean == pytest.approx(now.details["other_nll"] - before.details["other_nll"])
    assert all_.low < all_.mean < all_.high


def test_a_window_without_hits_has_no_loss_of_hits():
    details = measured(0, window=2).details
    assert details["ar_hit_nll"] is None
    assert details["other_nll"] == pytest.approx(details["nll"])
    compared = measured(1, window=2), measured(0, window=2)
    assert [change.estimate(*compared) is None for change in POSITIONS.change_metrics] == [False, True, False]


def test_a_sweep_tabulates_and_draws_the_loss_by_place(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    options = SweepOptions(
        tasks=("nll",), bits=(3,), task_options={"characters": 900, "window": WINDOW}, dtype="float32"
    )
    sweep = run_sweep([model], options, tmp_path / "out")
    sweep.require_complete()
    written = write_outputs(sweep, tmp_path / "out")
    assert "positions.png" in {file.name for file in written}
    full, low = json_rows(sweep)
    assert low["nll nll_change"] == pytest.approx(low["nll nll"] - full["nll nll"])
    assert low["nll ar_hit_nll_change_low"] < low["nll ar_hit_nll_change"] < low["nll ar_hit_nll_change_high"]
    head = sweep.table().splitlines()[0]
    assert head.index("NLL") < head.index("AR-hit") < head.index("other")
    ((title, lines),) = position_panels(sweep.cells_of(task_class_named("nll"))).items()
    assert title == "attention logits, per row"
    assert [line.scheme for line in lines] == ["16", "3:row"]
    assert [point[0] for point in lines[0].points] == [1, 2, 4, 8, 16, 32, 37]


def test_what_cannot_be_read_is_refused():
    with pytest.raises(UsageError, match="windows of 2 tokens or more, got 1"):
        make_tasks(["nll"], {"window": 1}, 4096)
    with pytest.raises(UsageError, match="expected nll"):
        make_tasks(["nll:3"], {}, 4096)
    model = tiny_lm.llama()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError):
        score_positions(TorchModel(model, tiny_lm.tokenizer()), TEXT, WINDOW)


def test_what_gained_much_is_not_said_to_have_changed_least():
    """A loss in nats may fall, too."""
    options = SweepOptions(tasks=("nll",), bits=(8, 4))
    cells = []
    for point, nll in zip(list_points([Path("transformer")], options), (2.0, 1.99, 1.5), strict=True):
        counted = {f"{kind}_by_window": [3, 3] for kind in ("tokens", "ar_hits", "others")}
        losses = {f"{kind}_by_window": [nll, nll] for kind in ("nll", "ar_hit_nll", "other_nll")}
        stored = {"seconds": 1.0, "stored": {"weights": 5, "kv_per_token": 1.0}}
        cells.append(Cell(point, "nll", TaskResult.from_dict({"metric": "nll", **counted, **losses, **stored}), None))
    (sentence,) = summarize_findings(SweepResult(cells, {}))
    assert sentence.startswith("nll: the smallest change is that of transformer at logits 8:row")
    assert "the largest that of transformer at logits 4:row" in sentence
