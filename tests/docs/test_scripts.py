"""The shell scripts of examples/: their commands are ones that there are, and they say what to install for them."""

import re

from tests.docs.commands import ROOT, fault_of
from tests.support.tables import in_one_test

SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
EXTRAS = {"export": "onnx", "verify": "onnx", "run": "onnx", "search": "search"}


@in_one_test("script", SCRIPTS)
def test_a_script_installs_what_its_commands_need(script):
    text = script.read_text(encoding="utf-8")
    calls = re.findall(r"^(?:\[.*\] \|\| )?(diffquant .*)", text, re.MULTILINE)
    assert len(calls) >= 4
    assert not [why for call in calls if (why := fault_of(call))]
    installed = re.search(r"`pip install '?\.(?:\[(.*)\]')?`", text)
    needed = {EXTRAS[verb] for call in calls if (verb := call.split()[1]) in EXTRAS}
    assert {*filter(None, (installed[1] or "").split(","))} == needed
