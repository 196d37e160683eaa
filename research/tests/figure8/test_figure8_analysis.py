"""The comparisons of Figure 8's trainings, on results that were made up so that their answer is known."""

from dataclasses import replace
from itertools import combinations

import pytest
from scipy.stats import ttest_1samp, ttest_ind

from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from research.figure8.analysis import summary
from research.figure8.comparisons import MAIN, ON_PURPOSE, SIX, THREE, bits_won, check_alike
from research.figure8.deciding import holm, interval, p_value
from research.figure8.direction import along, moved, place_of
from research.figure8.plan import CELLS, EDGES, GRID, KINDS, SIZES, best_rate, grid_name, listed, rate_of, upcoming
from research.figure8.scoring import FORMATS, OPERANDS, SCHEMES, STEPS
from research.train.models import matched

BITS = {"diff-v1": [-0.6, -0.5, -0.4, -0.7, -0.55, -0.3], "diff-v2": [0.2, -0.2, 0.1, 0.3, -0.3, 0.05]}
MAGNITUDES = {kind: {"top": {"1": 9.0, "10": 8.0}, "median": 1.0} for kind in ("logits", "hidden")}


def result(run, kl=0.04, **changed):
    """A raw result whose KL is `kl` under every scheme, in unequal passages."""
    passages = [kl * weight for weight in (0.5, 1.0, 1.5)]
    errors = {scheme: {"variance": [kl]} for scheme in SCHEMES}
    trained = {"arithmetic": "bf16", "size": "1.25M", "parameters": 1.25e6, "steps": 1800}
    return (
        trained
        | {
            "run": run,
            "training_text": {"sha256": "a"},
            "environment": {"commit": "c"},
            "validation": {"nll": 4.0, "perplexity": 54.6},
            "books": {
                "reading": {"text": "b", "windows": 1},
                "kl": dict.fromkeys(SCHEMES, passages),
                "kl_of_steps": {f"{step:g}": [step**2 * each for each in passages] for step in STEPS},
                "kl_of_qk": dict.fromkeys(OPERANDS, passages),
                "kl_of_formats": dict.fromkeys(FORMATS, passages),
                "layers": [{"sensitivity": {"first": 1.0}, "errors": errors}],
            },
            "web": {"kl": dict.fromkeys(SCHEMES, passages)},
            "outliers": {"overall": MAGNITUDES, "layers": [MAGNITUDES]},
        }
        | changed
    )


def second_stage():
    """Results of E1's second stage; each DIFF model wins its bits over a Transformer that differs by seed."""
    there = {}
    for number, seed in enumerate(SIX):
        plain = 0.03 + 0.004 * number
        there[f"e1-transformer-seed-{seed}"] = plain
        there |= {f"e1-{kind}-seed-{seed}": plain * 4 ** -bits[number] for kind, bits in BITS.items()}
    return {name: result(name, kl) for name, kl in there.items()}


def test_bits_won_are_compared_over_trainings_as_scipy_does():
    there = second_stage()
    for comparison in MAIN:
        values = comparison.values(there, bits_won("4:tensor"))
        assert values == pytest.approx(BITS[comparison.kind])
        oracle = ttest_1samp(BITS[comparison.kind], 0.0)
        assert p_value(values) == pytest.approx(oracle.pvalue)
        low, high = oracle.confidence_interval()
        assert interval(values).endswith(f"[{low:+.2f}, {high:+.2f}]")
    text = summary(there)
    primary = text[text.index("## Primary") : text.index("## Secondary")]
    v1, v2 = primary.strip().splitlines()[-2:]
    assert "DIFF loses" in v1
    assert "undecided" in v2
    assert text.count("\n| `") == 36


def test_formats_are_compared_over_the_longer_trainings():
    there = {f"e2-transformer-seed-{seed}": result("plain", 0.04) for seed in (101, 102, 103)}
    there |= {f"e2-diff-v1-seed-{seed}": result("diff", 0.01) for seed in (101, 102, 103)}
    text = summary(there)
    section = text[text.index("## E2: formats") : text.index("## Outliers")]
    assert section.count("| +1.00 [+1.00, +1.00] |  |") == len(FORMATS)


def test_a_line_through_two_sizes_moves_as_welch_has_it_and_holds_their_means():
    small, large = BITS["diff-v1"], [0.2, -0.1, 0.4]
    oracle = ttest_ind(large, small, equal_var=False).confidence_interval()
    change = moved(small, large)
    assert (change.low, change.high) == pytest.approx((oracle.low, oracle.high))
    assert moved(small, large, 0.5).low == pytest.approx(2 * oracle.low)
    for place, values in enumerate((small, large)):
        read, own = along(small, large, place), ttest_1samp(values, 0.0).confidence_interval()
        assert (read.low, read.high) == pytest.approx((own.low, own.high))
    assert along(small, large, 2).mean == pytest.approx(2 * sum(large) / 3 - sum(small) / 6)
    assert place_of(4e6, 1e6, 2e6) == pytest.approx(2)


def test_the_direction_with_size_waits_for_all_trainings_and_is_read_far_beyond_them():
    there = second_stage()
    larger = {
        f"e3-{kind}-seed-{seed}": result("large", size="5M", parameters=12.5e6) for kind in KINDS for seed in THREE
    }
    text = summary(there | larger)
    section = text[text.index("## E3: a line") : text.index("## E3: KL of KV")]
    (row,) = (line for line in section.splitlines() if line.startswith("| diff-v1 | bits won"))
    first, second, tenfold, *far = row.split(" | ")[2:]
    assert (first, second) == ("-0.51 [-0.66, -0.36]", "+0.00 [+0.00, +0.00]")
    assert tenfold == "+0.51 [+0.36, +0.66]"
    # 135 million are log10(108) = 2.033 tenfolds from the first mean.
    assert far[0].startswith("+0.53 [")
    with pytest.raises(UsageError, match=r"differ in training text.*large"):
        summary(there | {name: each | {"training_text": {"sha256": "other"}} for name, each in larger.items()})
    larger.popitem()
    assert "| diff-v2 | not yet |" in summary(there | larger)


def test_a_rate_of_e3_is_chosen_by_committed_sources_alone():
    there = second_stage()
    there["e3-diff-v1-check"] = result("e3-diff-v1-check", rate=2e-3, environment={"commit": "c+changes"})
    with pytest.raises(UsageError, match="no results: e3-diff-v1-check"):
        summary(there)


@pytest.mark.parametrize("left", [2, 1, 0])
def test_trainings_that_diverged_are_missed_by_every_table_that_has_their_comparison(left):
    there = second_stage()
    there |= {f"e3-{kind}-seed-{seed}": result("large", size="5M", parameters=5e6) for kind in KINDS for seed in THREE}
    for seed in THREE[left:]:
        there[f"e3-diff-v1-seed-{seed}"] = {k: v for k, v in result("v1", size="5M").items() if k != "books"} | {
            "diverged": "the loss at step 7 is nan"
        }
    text = summary(there)
    (row,) = (line for line in text.splitlines() if line.startswith("| e3: diff-v1"))
    assert row.count(f"({left} of 3)") == 4
    (row,) = (line for line in text.splitlines() if line.startswith("| diff-v1 | bits won at"))
    assert f"({left} of 3)" in row
    assert ("too many diverged" in row) == (left < 2)


def test_caches_are_summed_up_once_a_kind_has_its_three_trainings():
    caches = {"4:row, 4:row": {"bytes_long": 25.0, "prose": {"kl": 0.001}, "elsewhere": {"kl": 0.002}}}
    read = {"caches": {"bytes_long_at_16_bits": 100.0, "rows": caches}}
    there = {f"e3-diff-v2-seed-{seed}": result("v2", **read) for seed in THREE}
    there |= {f"e3-diff-v1-seed-{seed}": result("v1", **read) for seed in THREE[:2]}
    text = summary(there)
    section = text[text.index("## E3: KL of KV caches") : text.index("## Outliers")]
    assert "| diff-v2 | `4:row, 4:row` | 25.0% | +1.00 [+1.00, +1.00] | +2.00 [+2.00, +2.00] |" in section
    assert "| diff-v1 | 2 of 3 |" in section


def test_holms_p_values_are_those_of_closed_testing():
    p_values = [0.04, 0.001, 0.03, 0.2, 0.012]
    closed = [
        max(
            min(1.0, len(subset) * min(p_values[i] for i in subset))
            for size in range(1, 6)
            for subset in combinations(range(5), size)
            if index in subset
        )
        for index in range(5)
    ]
    assert holm(p_values) == pytest.approx(closed)


@pytest.mark.parametrize("missing", ["e1-transformer-seed-106", "e1-diff-v2-seed-101"])
def test_nothing_is_decided_before_all_trainings_are_there(missing):
    there = second_stage()
    del there[missing]
    text = summary(there)
    assert "17 of 18 trainings" in text
    assert not any(word in text for word in ("DIFF wins", "DIFF loses", "undecided"))
    text = text[text.index("## Primary") : text.index("## Secondary: parts")]
    assert "[" not in text


@pytest.mark.parametrize(
    ("named", "changed"),
    [
        ("arithmetic", {"arithmetic": "float32"}),
        ("size", {"size": "5.3M"}),
        ("steps", {"steps": 5400}),
        ("training text", {"training_text": {"sha256": "other"}}),
        ("scored text", {"books": result("x")["books"] | {"reading": {"text": "other", "windows": 1}}}),
        ("sources differed", {"environment": {"commit": "c+changes"}}),
    ],
)
def test_trainings_that_differ_in_anything_but_kind_are_not_compared(named, changed):
    there = second_stage()
    there["e1-diff-v1-seed-103"] |= changed
    with pytest.raises(UsageError, match=rf"{named}.*e1-diff-v1-seed-103"):
        MAIN[0].values(there, bits_won("4:tensor"))
    check_alike([there["e1-diff-v1-seed-104"], there["e1-transformer-seed-104"]])


def test_a_training_that_diverged_drops_out_of_its_comparison():
    there = second_stage()
    there["e1-diff-v1-seed-103"] = {k: v for k, v in result("e1-diff-v1-seed-103").items() if k != "books"} | {
        "diverged": "the loss at step 7 is nan"
    }
    assert MAIN[0].values(there, bits_won("4:tensor")) == pytest.approx([*BITS["diff-v1"][:2], *BITS["diff-v1"][3:]])
    assert MAIN[0].is_complete(there)


@pytest.mark.parametrize(("moved", "said"), [(0.1, "does not matter"), (0.4, "matters: E1")])
def test_the_arithmetic_matters_where_it_moves_more_than_two_standard_deviations(moved, said):
    there = second_stage()
    there["arithmetic-transformer-seed-101"] = result("t", 0.05, arithmetic="float32")
    there["arithmetic-diff-v1-seed-101"] = result("d", 0.05 * 4 ** -(-0.6 + moved), arithmetic="float32")
    line = next(x for x in summary(there).splitlines() if x.startswith(f"| diff-v1 | {moved:+.2f} |"))
    assert said in line


def test_large_logits_on_purpose_are_compared_among_themselves():
    """Each DIFF kind with the Transformer that was trained alike, and not with the one at its best rate."""
    there = second_stage()
    for seed, bits in zip(THREE, (0.5, 0.3, 0.4), strict=True):
        there[f"e1-transformer-outliers-seed-{seed}"] = result("t", 0.5)
        found = result("d", 0.5 * 4**-bits)
        top = {"top": {"1": 3.0, "10": 2.0}, "median": 1.0}
        found["outliers"] = {"overall": {"logits": top, "hidden": top}}
        there[f"e1-diff-v1-outliers-seed-{seed}"] = found
    text = summary(there)
    section = text[text.index("## Outliers on purpose") :]
    line = next(x for x in section.splitlines() if x.startswith("| 4:tensor |"))
    low, high = ttest_1samp((0.5, 0.3, 0.4), 0.0).confidence_interval()
    assert f"+0.40 [{low:+.2f}, {high:+.2f}]" in line
    ratio = next(x for x in section.splitlines() if x.startswith("| largest logit over"))
    assert "+0.33 [+0.33, +0.33]" in ratio
    # Their parts, range and sensitivity, do not add up, and are not shown.
    assert "diff-v1-outliers − transformer-outliers" not in text


def losses(kind, by_rate):
    return {grid_name(kind, rate): {"validation": {"nll": nll}} for rate, nll in by_rate.items()}


def test_a_kind_takes_the_rate_of_lowest_loss_and_looks_beyond_an_end_of_the_grid():
    inside = losses("diff-v1", dict(zip(GRID, (4.2, 4.1, 4.0, 4.3), strict=True)))
    assert best_rate("diff-v1", inside) == 4e-3
    assert best_rate("diff-v1", dict(list(inside.items())[:3])) is None
    ending = losses("diff-v1", dict(zip(GRID, (4.3, 4.2, 4.1, 4.0), strict=True)))
    assert best_rate("diff-v1", ending) is None
    assert [run.name for run in upcoming(ending) if run.kind == "diff-v1"] == ["e1-diff-v1-rate-16e-3"]
    assert best_rate("diff-v1", ending | losses("diff-v1", {16e-3: 3.9})) == 16e-3
    assert best_rate("diff-v1", ending | losses("diff-v1", {16e-3: None})) == 8e-3


def test_the_list_can_be_run_from_its_beginning_to_its_end():
    """Whatever decides a rate stands before it, and only rates beyond the grid stay away."""
    there, rates = {}, {}
    while runs := upcoming(there):
        run = runs[0]
        rates[run.name] = rate_of(run, there)
        there[run.name] = {"validation": {"nll": 5 - (rates[run.name] in (4e-3, 2e-3)) - (run.rule == "best × 2")}}
    left = [run for run in listed() if run.name not in there]
    assert {run.rule for run in left} == {"0.5e-3?", "16e-3?"}
    assert list(there) == [run.name for run in listed() if run not in left]
    best = rates["e1-diff-v2-seed-101"]
    assert rates["e2-diff-v2-seed-101"] == pytest.approx(best * 3**-0.32, rel=1e-3)
    assert rates["e3-diff-v2-check-half"] == pytest.approx(best / 4 * (1950 / 1800) ** -0.32, rel=1e-3)
    assert rates["e3-diff-v2-seed-101"] == pytest.approx(best * (7800 / 1800) ** -0.32, rel=1e-3)
    assert rates["e1-gated-seed-101"] == rates["e1-transformer-seed-101"]
    assert rates["e3-diff-v2-check-double"] == pytest.approx(best * (1950 / 1800) ** -0.32, rel=1e-3)
    for comparison in ON_PURPOSE:
        for name in (name for pair in comparison.names for name in pair):
            assert rates[name] == 4 * rates[name.replace("-outliers", "")]


FACTORIAL = [run for run in listed() if run.name.startswith("e4-")]


def test_each_cell_of_the_factorial_takes_the_best_rate_of_its_own_grid():
    """Unlike the controls of E1, which take the Transformer's."""
    best = {"half-heads": 2e-3, "half-heads-norm": 8e-3, "diff-v1-no-norm": 1e-3, "diff-v1": 4e-3, "transformer": 4e-3}
    there = {}
    for kind, rate in best.items():
        there |= losses(kind, {each: 4.0 + (each != rate) for each in (*GRID, *EDGES.values())})
    taken = {run.kind: rate_of(run, there) for run in FACTORIAL if run.seed == 107}
    assert taken == {kind: best[kind] for kind in CELLS.values()}
    needed = {run.name: rate_of(run, there) for run in FACTORIAL if run.rule.endswith("?")}
    assert {name for name, rate in needed.items() if rate} == {
        "e4-half-heads-norm-rate-16e-3",
        "e4-diff-v1-no-norm-rate-0.5e-3",
    }
    (control,) = (run for run in listed() if run.name == "e1-half-heads-seed-101")
    assert rate_of(control, there) == best["transformer"]


def test_cells_of_the_factorial_differ_in_maps_and_norm_alone():
    models = {at: matched(kind, SIZES["1.25M"], 2048) for at, kind in CELLS.items()}
    specs = {at: config.diff_spec for at, config in models.items()}
    counts = [DiffTransformer(config).num_parameters() for config in models.values()]
    assert max(counts) / min(counts) < 1.001
    for (maps, has_norm), spec in specs.items():
        assert (spec.maps, spec.post_norm != "none", spec.scale_by_init) == (maps, has_norm, has_norm)
        assert (spec.pairs, spec.value_dim, spec.maps * spec.head_dim) == (2, 64, 64)
        assert replace(spec, post_norm="none", scale_by_init=False) == specs[maps, False]
