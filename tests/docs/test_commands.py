"""The commands on the pages: each is one that there is, with options that it has."""

from tests.docs.commands import PAGES, calls_on, fault_of
from tests.support.tables import in_one_test


@in_one_test("page", PAGES)
def test_every_command_on_a_page_is_one_that_there_is(page):
    """Those of the research are checked by its own tests."""
    calls = [(line, call) for line, call in calls_on(page) if not call.startswith("python -m research")]
    faults = [f"{page.name}:{line}: {call}: {why}" for line, call in calls if (why := fault_of(call))]
    assert not faults, "\n".join(faults)


def test_commands_that_there_are_not_are_named():
    assert fault_of("diffquant quantise MODEL") == "there is no command quantise"
    assert fault_of("diffquant inspect MODEL --everything -o x") == "inspect has no --everything, -o"
    assert fault_of("python -m diffquant.nothing") == "there is no module diffquant.nothing"
    assert fault_of("make nothing") == "there is no target nothing"
    assert fault_of("diffquant sweep A B -o out --bits 8,6 --tasks needle:4") is None
    assert fault_of("diffquant sweep A -o out --task needle:4") == "sweep has no --task"
