"""Recording transcripts: what is run, and what stays of an earlier record."""

import json
import shutil

import pytest

from diffquant.errors import UsageError
from research.pages.render import ROOT
from research.studies import transcripts
from tests.support import tiny_lm

QUANTIZE, INSPECT = "diffquant quantize v2 -o low --weights 4:row", "diffquant inspect v2"


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(transcripts, "RECORDED", tmp_path / "transcripts.json")
    monkeypatch.setattr(transcripts, "COMMANDS", (INSPECT, QUANTIZE))
    return tmp_path / "transcripts.json"


def test_what_commands_print_is_recorded_and_some_are_recorded_again(recorded, tmp_path, monkeypatch):
    model = tiny_lm.write_diff_v2(tmp_path / "v2")
    transcripts.main(model)
    first = json.loads(recorded.read_text())
    inspected, quantized = first["transcripts"]
    assert (inspected["command"], quantized["command"]) == (INSPECT, QUANTIZE)
    assert inspected["output"][0].startswith("v2: DIFF V2")
    assert quantized["output"][0].startswith("low: ")
    assert {"commit", "date"} <= first["environment"].keys()
    marked = first["environment"] | {"commit": "earlier"}
    recorded.write_text(json.dumps(first | {"environment": marked}))
    monkeypatch.setattr(transcripts, "COMMANDS", (INSPECT, f"{QUANTIZE}  # 1 s"))
    transcripts.main(model, again="inspect", folder=tmp_path)
    again = json.loads(recorded.read_text())
    inspected, quantized = again["transcripts"]
    assert again["environment"]["commit"] == first["environment"]["commit"]
    assert "environment" not in inspected
    assert quantized == first["transcripts"][1] | {"environment": marked, "command": f"{QUANTIZE}  # 1 s"}


def test_a_command_that_fails_records_nothing(recorded, tmp_path):
    absent = shutil.copytree(ROOT / "docs", tmp_path / "v2")
    with pytest.raises(UsageError, match=r"`diffquant inspect v2` ended with \d"):
        transcripts.main(absent)
    assert not recorded.exists()
