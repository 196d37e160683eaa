"""Figure 8 over seeds: bits against each seed's own Transformer, and intervals over trainings."""

import json

import pytest
from scipy import stats

from diffquant.errors import UsageError
from research.studies.figure8_model import bits_won, parts_won
from research.studies.figure8_seeds import read_seed, seeds_summary

READING = {"passages": 2, "windows": 2, "text": "t"}


def result(generation, *kl, reading=READING):
    layer = {"sensitivity": {"first": kl[0]}, "errors": {"4:row": {"variance": [0.25]}}}
    nll = [2.0, 3.0, 4.0, 3.0]
    return {"generation": generation, "reading": reading, "nll": nll, "kl": {"4:row": list(kl)}, "layers": [layer]}


def seed(diff, **more):
    plain = result("Transformer", 0.1, 0.2, 0.3, 0.2)
    return {"Transformer": plain, "V1": result("V1", *(diff * kl for kl in plain["kl"]["4:row"]), **more)}


def test_a_kl_four_times_the_transformers_of_the_same_seed_is_a_bit_lost():
    for times, won in ((4.0, -1.0), (0.5, 0.5)):
        one = seed(times)
        assert bits_won(one["V1"], one["Transformer"], "4:row") == pytest.approx(won)


def test_the_interval_is_students_over_trainings():
    seeds = {"0": seed(4.0), "1": seed(2.0), "2": seed(1.0)}
    low, high = stats.t.interval(0.95, 2, loc=-0.5, scale=stats.sem([-1.0, -0.5, 0.0]))
    perplexities, bits = seeds_summary(seeds, ["4:row"]).split("\n\n")
    assert bits.splitlines()[-3] == f"| V1 | `4:row` | -1.00 | -0.50 | +0.00 | -0.50 [{low:+.2f}, {high:+.2f}] |"
    assert perplexities.splitlines()[-1] == "| V1 | 20.09 | 20.09 | 20.09 |"


def test_range_and_sensitivity_of_the_simple_model_are_told_apart():
    one = seed(4.0)
    one["V1"]["layers"][0]["errors"]["4:row"]["variance"] = [0.0625]
    assert parts_won(one["V1"], one["Transformer"], "4:row") == pytest.approx((1.0, -1.0))


@pytest.mark.parametrize(
    ("other", "schemes", "message"),
    [
        (seed(1.0, reading=READING | {"text": "u"}), ["4:row"], "another text or other windows than a, .*: b, V1"),
        (seed(1.0), ["4:row", "4:head"], "not all of 4:row, 4:head were measured: a, Transformer"),
        ({"Transformer": result("Transformer", 1.0)}, ["4:row"], "b has Transformer where a has Transformer, V1"),
    ],
)
def test_seeds_that_cannot_be_compared_are_refused(other, schemes, message):
    with pytest.raises(UsageError, match=message):
        seeds_summary({"a": seed(1.0), "b": other}, schemes)


def test_a_folder_is_one_model_of_each_generation(tmp_path):
    for name, each in seed(1.0).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    assert read_seed(tmp_path) == seed(1.0)
    (tmp_path / "again.json").write_text(json.dumps(seed(1.0)["V1"]))
    with pytest.raises(UsageError, match="results of Transformer, V1, V1"):
        read_seed(tmp_path)
    with pytest.raises(UsageError, match="no model"):
        read_seed(tmp_path / "none")
