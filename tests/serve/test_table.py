"""The page on serving shows what was recorded."""

import json

from tests.serving.table import PAGE, RAW, drawn, onto_page


def test_the_pages_table_is_that_of_the_raw_file():
    raw = json.loads(RAW.read_text())
    assert onto_page(PAGE.read_text(), drawn(raw)) == PAGE.read_text()
    assert all(found["tokens equal"] for found in raw["found"])
