"""Recording the pages' transcripts: what is run, and what of a page is replaced."""

import json
import shutil

import pytest

from diffquant.errors import UsageError
from research.check.page import ROOT
from research.studies import transcripts
from tests.support import tiny_lm

PAGE = """\
# A page

```
$ diffquant quantize v2 -o low --weights 4:row
low: typed by hand
and more
$ diffquant inspect v2
typed too
```

```
$ diffquant sweep v2 -o out
stays
```
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(transcripts, "RECORDED", tmp_path / "transcripts.json")
    monkeypatch.setattr(transcripts, "PAGES", (tmp_path / "page.md",))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path / "page.md"


def test_what_commands_print_is_recorded_and_put_onto_the_page(page, tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "v2")
    transcripts.main(model)
    recorded = json.loads((tmp_path / "transcripts.json").read_text())
    inspected, quantized = recorded["transcripts"]
    assert inspected["command"] == "diffquant inspect v2"
    assert inspected["output"][0].startswith("v2: DIFF V2")
    assert quantized["output"][0].startswith("low: ")
    assert {"commit", "code", "date"} <= recorded["environment"].keys()
    before, after = PAGE.splitlines(), page.read_text().splitlines()
    assert [line for line in after if line in before] == [
        line for line in before if "typed" not in line and line != "and more"
    ]
    assert [line for line in after if line not in before] == quantized["output"] + inspected["output"]


def test_some_commands_are_recorded_again_and_the_others_stay(page, tmp_path):
    model, recorded = tiny_lm.write_diff_v2(tmp_path / "v2"), tmp_path / "transcripts.json"
    transcripts.main(model)
    first = json.loads(recorded.read_text())
    marked = first["environment"] | {"commit": "earlier"}
    recorded.write_text(json.dumps(first | {"environment": marked}))
    page.write_text(page.read_text().replace("--weights 4:row", "--weights 4:row  # 1 s"))
    transcripts.main(model, again="inspect", folder=tmp_path)
    again = json.loads(recorded.read_text())
    inspected, quantized = again["transcripts"]
    assert again["environment"]["commit"] == first["environment"]["commit"]
    assert "environment" not in inspected
    assert inspected["output"] == first["transcripts"][0]["output"]
    kept = first["transcripts"][1]
    assert quantized == kept | {"environment": marked, "command": kept["command"] + "  # 1 s"}


def test_a_command_that_fails_leaves_the_page_as_it_is(page, tmp_path):
    absent = shutil.copytree(ROOT / "docs", tmp_path / "v2")
    with pytest.raises(UsageError, match=r"`diffquant inspect v2` ended with \d"):
        transcripts.main(absent)
    assert page.read_text() == PAGE
    assert not (tmp_path / "transcripts.json").exists()
