import gzip
import json
import lzma
import time
import tracemalloc

import datasets
import pytest
from lm_eval.tasks.hellaswag.utils import process_docs

from diffquant import data
from diffquant.errors import UsageError
from diffquant.measure.protocols import hellaswag
from diffquant.measure.protocols.hellaswag import HellaSwagItem, evaluate_hellaswag, load_items
from diffquant.measure.torch_model import TorchModel
from diffquant.support import files
from tests.support import tiny_lm
from tests.support.tables import in_one_test


def test_text_is_the_harness_text_on_every_item_that_ships():
    raw = [json.loads(line) for line in data.hellaswag_lines()]
    items = load_items()
    assert len(items) == 1000
    harness = process_docs(datasets.Dataset.from_list(raw))
    assert [item.query for item in items] == harness["query"][:]
    assert [list(item.endings) for item in items] == harness["choices"][:]
    assert [item.label for item in items] == harness["gold"][:]


@in_one_test("packing", [gzip, lzma])
def test_a_prepared_file_gives_its_queries_as_they_are(tmp_path, packing):
    entry = {"query": "A  cook: He [step] stirs", "endings": [" the pot. ", "a [x]car"], "label": "1"}
    path = tmp_path / "items.jsonl"
    path.write_bytes(packing.compress(json.dumps(entry).encode()))
    (item,) = load_items(path)
    assert (item.query, item.endings, item.label) == (entry["query"], (" the pot. ", "a [x]car"), 1)


def test_items_that_lm_eval_prepared_are_scored_as_it_scores_them(tmp_path):
    # Its texts may begin with a blank or hold brackets that were nested.
    raw = [json.loads(line) for line in data.hellaswag_lines()[:3]]
    raw[0]["endings"][1] = "[header] pours [title] [substeps]  [the [pot] tea."
    harness = process_docs(datasets.Dataset.from_list(raw))
    prepared = [
        {"query": item["query"], "endings": item["choices"], "label": item["gold"]} for item in harness.to_list()
    ]
    for name, entries in (("raw", raw), ("prepared", prepared)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, entries)))
    assert load_items(tmp_path / "prepared") == load_items(tmp_path / "raw")
    assert [list(item.endings) for item in load_items(tmp_path / "raw")] == harness["choices"][:]


def test_brackets_that_nothing_closes_take_linear_time():
    started = time.process_time()
    assert hellaswag.remove_markup("[" * 200_000 + "a]b\n[c") == "b\n[c"
    assert hellaswag.remove_markup("[" * 200_000) == "[" * 200_000
    assert time.process_time() - started < 5


def test_lines_end_where_json_lines_end_behind_a_mark_of_the_byte_order_or_not(tmp_path):
    # Python's own lines end at each of these, too.
    entry = {"query": "q", "endings": ["a\u2028b", "c\x85d"], "label": 0}
    line = json.dumps(entry, ensure_ascii=False)
    path = tmp_path / "items.jsonl"
    path.write_bytes(f"\ufeff{line}\r\n{line}\r\n".encode())
    assert [item.endings for item in load_items(path)] == [("a\u2028b", "c\x85d")] * 2


def test_every_bad_line_is_named(tmp_path):
    good = {"query": "q", "endings": ["a", "b"], "label": 0}
    entries = [good | {"label": 2}, good | {"endings": ["a", ""]}, {"ctx_a": "x", "endings": ["a", "b"], "label": 0}]
    entries += [[1], good | {"query": "half of a pair \ud83d"}, good | {"endings": ["a", "\udc00"]}]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join([json.dumps(good), "{", *map(json.dumps, entries)]))
    with pytest.raises(UsageError) as error:
        load_items(path)
    for part in ("7 lines", "line 2", "line 3: label 2", "line 4: endings", "activity_label, ctx_b", "line 6"):
        assert part in str(error.value)


ITEMS = b'{"query": "q", "endings": ["a", "b"], "label": 0}' * 9
GZIP, XZ = gzip.compress(ITEMS), lzma.compress(ITEMS)
UNREADABLE = {
    "empty": b"",
    "blank": b"\n \n",
    "bytes": b"\xff\xfe",
    "no gzip": b"\x1f\x8bbroken",
    "cut gzip": GZIP[:-20],
    "gzip of other data": GZIP[:20] + bytes(20) + GZIP[40:],
    "no xz": XZ[:6] + b"broken",
    "cut xz": XZ[:-20],
    "deep": b"[" * 100_000,
    "zeros": bytes(80),
    "label of other digits": '{"query": "q", "endings": ["a", "b"], "label": "\u0661"}'.encode(),
    "label of no number": b'{"query": "q", "endings": ["a", "b"], "label": true}',
    "endless label": b'{"query": "q", "endings": ["a", "b"], "label": Infinity}',
    "name given twice": b'{"query": "q", "query": "r", "endings": ["a", "b"], "label": 0}',
}


@in_one_test("content", UNREADABLE.values())
def test_an_unreadable_or_empty_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "items.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"items\.jsonl"):
        load_items(path)


@pytest.mark.parametrize("packing", [gzip, lzma])
def test_a_file_that_unpacks_to_more_than_any_items_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(files, "LARGEST", 1 << 20)
    path = tmp_path / "items.jsonl"
    path.write_bytes(packing.compress(b"\n" * (1 << 26)))
    tracemalloc.start()
    with pytest.raises(UsageError, match="more than the limit of 1 MiB"):
        load_items(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_acc_counts_sums_and_acc_norm_divides_by_characters(monkeypatch):
    monkeypatch.setattr(hellaswag, "score", lambda *_: [(-4.0, False), (-5.0, False)])
    model = TorchModel(tiny_lm.llama(), tiny_lm.tokenizer())
    result = evaluate_hellaswag(model, [HellaSwagItem("It was", ("the", "the city"), 1)])
    assert (result.details["choices_by_sum"], result.details["acc"]) == ([0], 0)
    assert (result.choices, result.values, result.score) == ([1], [1], 1)
