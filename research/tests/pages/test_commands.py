"""The commands on the research's pages, and those of the research on any page; a short one is run again."""

import pytest

from diffquant.calib.analysis.outliers import find_outliers
from diffquant.data import pocket_models
from diffquant.demo.pocket import ANSWER, AT_PAPERS_RATIO, SENSITIVITY
from research.check.pages.figure8 import MORE, WON
from research.check.pages.figure8_ratios_words import SENSITIVITY as MORE_AT_EQUAL_STEPS
from research.check.pages.figure8_ratios_words import WON_AT_PAPERS
from research.check.pages.pocket import accuracy
from research.check.raw import raw
from tests.docs.commands import PAGES, ROOT, calls_on, fault_of

OWN = [ROOT / "research/README.md", *sorted((ROOT / "research").glob("*/*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *OWN], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_that_there_is(page):
    calls = [(line, call) for line, call in calls_on(page) if page in OWN or call.startswith("python -m research")]
    faults = [f"{page.name}:{line}: {call}: {why}" for line, call in calls if (why := fault_of(call))]
    assert not faults, "\n".join(faults)


def test_a_program_that_there_is_not_is_named():
    assert fault_of("python -m research.studies.nothing") == "there is no module research.studies.nothing"


def test_the_pocket_models_have_the_outliers_that_their_page_gives():
    again = find_outliers(sorted(pocket_models("needle")), tokens=20_000, window=256, dtype="float32")
    committed = {model["name"]: model for model in raw("pocket-needle-outliers/outliers.json")["models"]}
    assert {model.fingerprint for model in again.models} == {model["fingerprint"] for model in committed.values()}
    for model in again.models:
        for kind, magnitudes in model.overall.items():
            expected = committed[model.name]["overall"][kind]
            assert magnitudes.top[1] == pytest.approx(expected["top"]["1"], rel=1e-3)
            assert magnitudes.median == pytest.approx(expected["median"], rel=0.01)


def test_the_demo_gives_the_answer_of_the_six_trainings():
    said = "V1 by {:.2f} bits [{:.2f}, {:.2f}], V2 by {:.2f} [{:.2f}, {:.2f}]"
    assert said.format(*MORE["DIFF V1"], *MORE["DIFF V2"]) == ANSWER
    assert all(len(won) == 6 and max(won) < 0 for won in WON.values())
    assert "V1 {:.2f} bits and V2 {:.2f}".format(*(more[0] for more in MORE_AT_EQUAL_STEPS.values())) == SENSITIVITY
    assert "{:.2f} to {:.2f}".format(*WON_AT_PAPERS) == AT_PAPERS_RATIO


def test_which_of_the_demos_models_loses_most_is_an_accident_of_its_training():
    kept = [
        [accuracy(folder, f"needle-{kind}", "4:tensor", 4) for kind in ("transformer", "diff-v1", "diff-v2")]
        for folder in ("pocket-needle", "pocket-needle-seed-1")
    ]
    assert [trio.index(min(trio)) for trio in kept] == [2, 0]
    assert [max(trio) == trio[0] for trio in kept] == [True, False]
