import subprocess
import sys
from pathlib import Path

import pytest

from diffquant.errors import UsageError
from diffquant.measure.sweep.grid import SweepOptions, list_points
from diffquant.recipe import Recipe
from tests.support.tables import in_one_test

MODEL, OTHER = Path("model"), Path("other")


def labels(models=(MODEL,), **options):
    return [point.label for point in list_points(models, SweepOptions(**options))]


def test_a_models_16_bits_come_once_and_first_whatever_bits_are_asked_for():
    grid = list_points([MODEL, OTHER], SweepOptions(bits=(4, 16, 8), targets=("logits", "kv")))
    assert [p.label for p in grid[:5]] == ["16 bits", "logits 8:row", "logits 4:row", "kv 8:row", "kv 4:row"]
    assert [p.is_baseline for p in grid] == [True, *[False] * 4] * 2
    assert [p.model for p in grid] == [MODEL] * 5 + [OTHER] * 5
    assert labels(bits=(4,)) == ["16 bits", "logits 4:row"]


def test_each_target_sets_its_own_part_of_the_recipe():
    grid = list_points([MODEL], SweepOptions(bits=(6,), targets=("weights", "kv", "k", "v", "logits", "qk", "p", "pv")))
    fields = ("weights", "kv", "k", "v", "logits", "qk", "p", "pv")
    assert [p.recipe for p in grid[1:]] == [Recipe.of(**{field: 6}) for field in fields]


def test_a_granularity_serves_the_targets_that_know_it():
    assert labels(bits=(4,), targets=("logits", "kv"), granularities=("row", "tensor:shift", "g32:rotated")) == [
        "16 bits",
        "logits 4:row",
        "logits 4:tensor:shift",
        "kv 4:row",
        "kv 4:g32:rotated",
    ]
    assert labels(bits=(4,), targets=("logits", "qk"), granularities=("b64", "head:smooth", "pair")) == [
        "16 bits",
        "logits 4:b64",
        "logits 4:pair",
        "qk 4:b64",
        "qk 4:head:smooth",
    ]


def test_a_row_by_another_name_is_the_same_cell():
    names = {"bits": (4,), "targets": ("weights", "kv", "logits")}
    rows = labels(**names, granularities=("row",))
    assert labels(**names, granularities=("channel", "token", "row")) == rows
    assert labels(**names, granularities=("channel", "token")) == rows
    columns = labels(bits=(4,), targets=("pv",))
    assert columns == labels(bits=(4,), targets=("pv",), granularities=("channel",)) == ["16 bits", "pv 4:column"]


@in_one_test(
    ("options", "said"),
    [
        ({"targets": ("logit",)}, "unknown target 'logit'"),
        ({"granularities": ("rows",)}, "rows"),
        ({"targets": ("kv",), "granularities": ("tensor",)}, r"^k cannot be quantized per tensor; use [^;]*$"),
        ({"targets": ("kv", "logits"), "granularities": ("tensor",)}, "kv: supports none of tensor"),
        ({"bits": (1,)}, "bits must be 2 to 8"),
        ({"task_options": {"limits": 4}}, "no task has an option limits"),
        ({"batch_tokens": 0}, "batch tokens must be 1 or more"),
        ({"tasks": ()}, "no task: give one of hellaswag, "),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(options, said):
    with pytest.raises(UsageError, match=said):
        labels(**options)


def test_no_model_and_a_model_twice_are_refused():
    with pytest.raises(UsageError, match="no model"):
        labels(models=())
    with pytest.raises(UsageError, match="given twice"):
        labels(models=(MODEL, Path("./model")))


def test_options_cost_no_import_of_torch():
    made = "from diffquant.measure.sweep.grid import SweepOptions; SweepOptions()"
    code = f"import sys; {made}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
