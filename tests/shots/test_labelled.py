"""Labelled texts: the formats in which they are published, and what is said of bad ones."""

import json

import pytest

from diffquant.errors import UsageError
from examples.shots.labelled import Example, load_dataset
from tests.support.tables import in_one_test

PAIRS = [("How far is it?", "card_arrival"), ('He said "no", twice', "top up"), ("naïve\tcafé", "card_arrival")]
EXAMPLES = (
    Example("How far is it?", "card arrival"),
    Example('He said "no", twice', "top up"),
    Example("naïve café", "card arrival"),
)
JSONL = "\n".join(json.dumps({"text": t, "label": n, "id": 7}, ensure_ascii=False) for t, n in PAIRS)
TREC = """NUM:dist How far is it from Denver to Aspen ?
ENTY:cremat What films featured the character Popeye Doyle ?

HUM:desc Who was Galileo ?
"""


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@in_one_test(
    ("name", "content"),
    [
        ("jsonl", JSONL),
        ("jsonl", "\ufeff" + JSONL + "\n\n"),
        (
            "csv",
            'text,category\nHow far is it?,card_arrival\n"He said ""no"", twice",top up\n"naïve\ncafé",card_arrival\n',
        ),
        (
            "csv",
            "label,id,text\r\ncard_arrival,1,How far is it?\r\n"
            'top up,2,"He said ""no"", twice"\r\ncard_arrival,3,naïve café',
        ),
        ("tsv", 'text\tlabel\nHow far is it?\tcard_arrival\nHe said "no", twice\ttop up\nnaïve café\tcard_arrival\n'),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path, name, content):
    path = write(tmp_path, f"data.{name}", content)
    data = load_dataset(path, path)
    assert data.train == data.test == EXAMPLES
    assert data.labels == ("card arrival", "top up")


def test_clinc_takes_both_splits_from_one_file_and_leaves_out_of_scope_ones(tmp_path):
    splits = {
        "oos_test": [["what is love", "oos"]],
        "val": [["ignored", "other"]],
        "train": [list(pair) for pair in PAIRS],
        "test": [["set a timer", "top up"]],
    }
    data = load_dataset(write(tmp_path, "data_full.json", json.dumps(splits)))
    assert data.train == EXAMPLES
    assert data.test == (Example("set a timer", "top up"),)


def test_trec_gives_coarse_or_fine_labels_in_words(tmp_path):
    path = write(tmp_path, "train_5500.label", TREC)
    assert [e.label for e in load_dataset(path, path).train] == ["numeric", "entity", "human"]
    fine = load_dataset(path, path, fine=True).train
    assert [e.label for e in fine] == ["numeric distance", "entity creation", "human description"]
    assert fine[0].text == "How far is it from Denver to Aspen ?"


BAD = {
    "missing file": ("absent.jsonl", None, "cannot read .*absent.jsonl"),
    "empty": ("a.jsonl", "", "is empty"),
    "header alone": ("a.csv", "text,label\n", "is empty"),
    "no suffix": ("a.parquet", JSONL, "choose from .jsonl, .csv, .tsv, .label, .json"),
    "encoding": ("a.jsonl", JSONL.encode("latin-1"), "is not UTF-8 .* convert it"),
    "missing column": ("a.csv", "text,intent\na,b\n", "header is text, intent; columns text and label or category"),
    "label twice": ("a.csv", "text,label,label\na,b,c\n", "its header has label twice"),
    "no header": ("a.csv", "How far?,distance\n", "columns text and label"),
    "blank header": ("a.csv", "\nHow far?,distance\n", "columns text and label"),
    "short row": ("a.csv", "text,label\na,x\nb\n", "1 lines of .* line 3: no label"),
    "text cut at its comma": ("a.csv", "text,label\nWhat, now,x\nb,y\n", "2 has 3 fields and the header 2; .*quotes"),
    "text cut at its tab": ("a.tsv", "text\tlabel\na\tb\tx\n", "line 2 has 3 fields"),
    "no json": ("a.jsonl", '{"text": "a", "label": "b"}\n{"text":', "line 2: Expecting value"),
    "deep json": ("a.jsonl", "[" * 100_000, "line 1: it is nested too deeply"),
    "deep clinc": ("a.json", "[" * 100_000, "nested too deeply"),
    "name given twice": ("a.jsonl", '{"text": "a", "text": "b", "label": "c"}', "line 1: it gives 'text' twice"),
    "not text": (
        "a.jsonl",
        '{"text": 3, "label": "b"}\n[1]\n',
        "2 lines of .* line 1: text must be words, got 3; line 2: no text",
    ),
    "half of a pair": ("a.jsonl", '{"text": "a\\ud83d", "label": "b"}', r"line 1: text must be words, got 'a\\ud83d'"),
    "number as label": ("a.jsonl", '{"text": "a", "label": 3}', "line 1: label must be words, got 3"),
    "one class": ("a.jsonl", '{"text": "a", "label": "b"}', "every example is 'b'; two classes or more"),
    "trec line": ("a.label", "NUM:dist How far ?\nWho was it ?", "line 2: no text"),
    "clinc split": ("a.json", '{"train": [["a", "b"]]}', 'expected {"test"'),
    "clinc pair": ("a.json", '{"train": [["a", "b"], ["c"]], "test": []}', "train 2: no text"),
    "many": ("a.jsonl", "[]\n" * 9, "9 lines of .* and 4 more"),
}


@in_one_test(("name", "content", "message"), BAD.values())
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, message):
    path = tmp_path / name if content is None else write(tmp_path, name, content)
    with pytest.raises(UsageError, match=message):
        load_dataset(path, path)


def test_labels_that_are_only_in_the_test_file_are_named(tmp_path):
    train = write(tmp_path, "train.jsonl", JSONL)
    test = write(tmp_path, "test.csv", "text,label\na,refund\nb,top_up\n")
    with pytest.raises(UsageError, match=r"test.csv: labels that .*train.jsonl does not have: 'refund'$"):
        load_dataset(train, test)


def test_a_train_file_alone_and_fine_labels_elsewhere_are_refused(tmp_path):
    path = write(tmp_path, "train.jsonl", JSONL)
    with pytest.raises(UsageError, match="give test"):
        load_dataset(path)
    with pytest.raises(UsageError, match=r"fine chooses among TREC's labels, in .label files"):
        load_dataset(path, path, fine=True)
    coarse = write(tmp_path, "coarse.label", "NUM How far ?\nHUM Who ?\n")
    assert load_dataset(coarse, coarse).labels == ("human", "numeric")
    with pytest.raises(UsageError, match=r"2 lines of .* line 1: no label"):
        load_dataset(coarse, coarse, fine=True)
