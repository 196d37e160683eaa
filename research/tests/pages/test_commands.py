"""The commands on the research's pages, and those of the research on any page; a short one is run again."""

import pytest

from diffquant.verbs.demonstration import ANSWER, AT_PAPERS_RATIO, SENSITIVITY
from research.pages import figure8, needles
from tests.docs.commands import PAGES, ROOT, calls_on, fault_of

OWN = [ROOT / "research/README.md", *sorted((ROOT / "research").glob("*/*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *OWN], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_one_that_there_is(page):
    calls = [(line, call) for line, call in calls_on(page) if page in OWN or call.startswith("python -m research")]
    faults = [f"{page.name}:{line}: {call}: {why}" for line, call in calls if (why := fault_of(call))]
    assert not faults, "\n".join(faults)


def test_a_program_that_there_is_not_is_named():
    assert fault_of("python -m research.studies.nothing") == "there is no module research.studies.nothing"


def test_the_demo_gives_the_answer_of_the_six_trainings():
    v1, v2 = (figure8.more(kind) for kind in figure8.DIFF)
    said = "V1 needs {:.2f} bits more [{:.2f}, {:.2f}], V2 {:.2f} [{:.2f}, {:.2f}]"
    assert said.format(v1.mean, v1.low, v1.high, v2.mean, v2.low, v2.high) == ANSWER
    assert figure8.LOSES_IN_ALL_TRAININGS
    equal = [figure8.more(kind, "r = 1").mean for kind in figure8.DIFF]
    assert "V1 {:.2f} bits and V2 {:.2f}".format(*equal) == SENSITIVITY
    assert "{:.2f} to {:.2f}".format(*figure8.over_all("r = 8")) == AT_PAPERS_RATIO


def test_which_of_the_demos_models_loses_most_is_an_accident_of_its_training():
    assert needles.DEPENDS_ON_SEED
