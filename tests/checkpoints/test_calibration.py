"""Calibration data: chats by the tokenizer's template, datasets from the hub's cache, and sources mixed by weight."""

import json
import os
import subprocess
import sys

import datasets
import pytest
import torch

import diffquant
from diffquant import Recipe
from diffquant.checkpoints.calibration import calibration_text, read_calibration
from diffquant.checkpoints.corpora import open_corpora
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import encode_windows
from diffquant.data import books_text, calibration_books, pocket_models
from diffquant.errors import UsageError
from diffquant.measure.fidelity import calibration_note
from diffquant.quantization.roundings import ROUNDINGS, rounding_named
from diffquant.verbs.fidelity import CHARACTERS
from tests.support import tiny_lm

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_lm.write_llama(tmp_path_factory.mktemp("tiny") / "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def source(model):
    return open_source(model)


def chats(count, first=0):
    sentences = books_text()[: 200 * (first + count)]
    return [
        [
            {"role": "user", "content": f"{i}: {sentences[200 * i : 200 * i + 80]}"},
            {"role": "assistant", "content": sentences[200 * i + 80 : 200 * i + 200]},
        ]
        for i in range(first, first + count)
    ]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def chat_file(tmp_path):
    return write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats(40)])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache with a dataset of two configurations, and no connection."""
    folder = tmp_path / "hub/datasets--someone--chats/snapshots" / COMMIT
    (folder / "data").mkdir(parents=True)
    card = {"short": {"train": "a", "test": "b"}, "long": {"train": "c"}}
    lines = ["---", "configs:"]
    for config, splits in card.items():
        lines += [f"- config_name: {config}", *(["  default: true"] if config == "short" else []), "  data_files:"]
        for split, name in splits.items():
            lines += [f"  - split: {split}", f"    path: data/{name}.jsonl"]
            write_lines(
                folder / f"data/{name}.jsonl",
                [{"messages": chat, "id": 1} for chat in chats(20, 20 * "abc".index(name))],
            )
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return folder


def read(source, sources, window=32, tokens=640, seed=0):
    return read_calibration(sources, source.tokenizer, source.architecture, window, tokens, seed)


def test_a_plain_text_is_read_as_before(source, tmp_path):
    file = tmp_path / "books.txt"
    file.write_text(books_text()[:30_000], encoding="utf-8")
    model = diffquant.load(source, dtype=torch.float32)
    expected = encode_windows(model, source.tokenizer, books_text()[:30_000], 32, 650)
    calibration = read(source, file, tokens=650)
    assert torch.equal(calibration.ids, expected)
    assert calibration.record["tokens"] == expected.numel()
    assert not calibration.is_shuffled
    assert torch.equal(read(source, None).ids, expected)


def test_chats_are_the_templates_own_tokens(source, chat_file):
    ids = read(source, chat_file, tokens=32 * 1000).ids.flatten().tolist()
    theirs = [source.tokenizer.apply_chat_template(chat)["input_ids"] for chat in chats(40)]
    start, found = 0, []
    while start < len(ids) - max(map(len, theirs)):
        (number,) = [n for n, each in enumerate(theirs) if ids[start : start + len(each)] == each]
        found.append(number)
        start += len(theirs[number])
    assert len(set(found)) == len(found) > 30
    assert found != sorted(found)


def test_rows_of_text_begin_with_the_first_token(source, tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [{"text": f"Row {i}. \u2028 and more of it"} for i in range(30)])
    ids = read(source, file, tokens=320).ids.flatten().tolist()
    rows = "".join(source.tokenizer.decode(ids).partition("<s>")[1:]).split("<s>")[1:-1]
    assert len(rows) > 5
    assert set(rows) <= {f"Row {i}. \u2028 and more of it" for i in range(30)}


def test_a_seed_draws_other_rows_and_the_record_tells(source, chat_file):
    first, again, other = (read(source, chat_file, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.ids, again.ids)
    assert first.record == again.record
    assert not torch.equal(first.ids, other.ids)
    assert first.digest != other.digest


def test_sources_are_mixed_by_weight_in_every_part(source, chat_file, tmp_path):
    text = tmp_path / "books.txt"
    text.write_text(books_text()[-30_000:], encoding="utf-8")
    calibration = read(source, [f"{chat_file}=0.75", f"{text}=0.25"])
    (of_chats, of_text) = calibration.record["sources"]
    assert [of_chats["samples"], of_text["samples"]] == [15, 5]
    assert sum(len(part) for part in calibration.parts) == calibration.record["tokens"] == 640
    prose = {tuple(row) for row in read(source, text).ids.tolist()}
    is_prose = [tuple(row) in prose for row in calibration.ids.tolist()]
    assert [sum(is_prose[i : i + 10]) for i in (0, 10)] in ([2, 3], [3, 2])
    mixed = calibration_text([f"{chat_file}=0.75", f"{text}=0.25"], source.tokenizer, 8000)
    assert len(mixed) == pytest.approx(8000, rel=0.05)
    assert all("</s>" in half and books_text()[-29_000:-28_900] in mixed for half in (mixed[:4000], mixed[4000:]))


@pytest.mark.parametrize(
    ("asked", "first"), [("", 0), (":test", 20), (":short:test", 20), (":long", 40), (":train[:5]", 0)]
)
def test_a_dataset_is_read_from_the_hubs_cache_without_a_connection(hub, source, asked, first):
    (corpus,) = open_corpora([f"someone/chats{asked}"])
    assert len(corpus.rows) == (5 if "[" in asked else 20)
    assert corpus.rows[0]["messages"] == chats(1, first)[0]
    assert read(source, f"someone/chats{asked}=2", tokens=64).record["sources"][0]["name"] == f"someone/chats{asked}"


def test_a_dataset_in_a_folder_or_file_is_read_as_its_rows(hub, tmp_path, source, monkeypatch):
    rows = datasets.load_dataset("json", data_files=str(hub / "data/a.jsonl"), split="train")
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([3])}).save_to_disk(tmp_path / "splits")
    expected = read(source, hub / "data/a.jsonl").ids
    for place in ("a.parquet", "saved", "splits"):
        assert torch.equal(read(source, tmp_path / place).ids, expected)
    assert torch.equal(read(source, f"{hub}:short").ids, expected)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# Notes")
    assert torch.equal(read(source, "a.parquet").ids, expected)
    (tmp_path / "a:b").mkdir()
    rows.to_parquet(tmp_path / "a:b/c.parquet")
    assert torch.equal(read(source, "a:b/c.parquet").ids, expected)
    monkeypatch.chdir(tmp_path / "saved")
    assert open_corpora(".")[0].name == "saved"
    assert len(open_corpora(f"{tmp_path / 'splits'}:test")[0].rows) == 1


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("someone/absent", "the datasets library cannot read someone/absent: .*hf download someone/absent --repo-type"),
        ("someone/chats:more", "someone/chats:more.*more"),
        ("someone/chats:a:b:c", "only by :CONFIG:SPLIT"),
        ("absent/books.txt", "cannot read text from absent/books.txt: No such file"),
        ("books.txt=0", "the weight of books.txt must be a positive number, got 0"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(hub, place, message):
    with pytest.raises(UsageError, match=message):
        open_corpora([place])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"text": "a b"', "[1]"], r"line \d of .*bad.jsonl is not (JSON|a JSON object)"),
        (['{"content": "a", "id": 3}'], "row 1 of bad.jsonl has content, id; calibration reads `messages`"),
        (['{"text": "\\ud800"}'], "row 1 of bad.jsonl"),
        (['{"messages": "hello"}'], "row 1 of bad.jsonl: messages must be a list of mappings"),
        (['{"messages": [{"role": "tool", "content": "x"}]}'], "row 1.*chat template refuses it: no role tool"),
        (['{"messages": [{"role": "user", "content": "\\udc00"}]}'], "row 1 of bad.jsonl is not valid text"),
        (['{"text": "a b"}'], r"bad.jsonl has \d tokens, fewer than one window of 32"),
        (["", " "], "bad.jsonl is empty"),
    ],
)
def test_rows_that_are_no_documents_are_refused_by_name(source, tmp_path, rows, message):
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(rows) + "\n")
    with pytest.raises(UsageError, match=message):
        read(source, file)


def test_chats_need_a_template(chat_file, tmp_path):
    plain = open_source(tiny_lm.write_llama(tmp_path / "plain"))
    with pytest.raises(
        UsageError, match=r"row .* of chats.jsonl is a chat, and the tokenizer of .*plain has no chat temp"
    ):
        read(plain, chat_file)


def test_a_source_with_too_little_text_is_said(source, tmp_path, caplog):
    file = write_lines(tmp_path / "few.jsonl", [{"text": books_text()[:300]}])
    calibration = read(source, file)
    assert (
        f"calibration reads {len(calibration.ids)} sequences of 32 tokens of few.jsonl, which has no more; 20"
        in caplog.text
    )


def test_quantize_reads_samples_of_chats_and_records_them(model, chat_file, tmp_path):
    text = tmp_path / "books.txt"
    text.write_text(books_text()[:9000], encoding="utf-8")
    sources = [f"{chat_file}=3", text]
    options = {"rounding": "gptq", "text": sources, "samples": 8, "window": 32, "seed": 5}
    diffquant.quantize(model, tmp_path / "low", "4:g16", **options)
    record = json.loads((tmp_path / "low/diffquant.json").read_text())["rounding"]
    assert (record["samples"], record["tokens"], record["window"], record["seed"]) == (8, 256, 32, 5)
    assert [(each["name"], each["samples"]) for each in record["sources"]] == [("chats.jsonl", 6), ("books.txt", 2)]
    recipe = Recipe.read(tmp_path / "low/recipe.yaml")
    assert recipe.rounding.to_plain()["text"] == [f"{chat_file}=3", str(text)]
    low = open_source(tmp_path / "low")
    scored = [low.tokenizer.encode(books_text()[:400], add_special_tokens=False)]
    assert ", which contains 0 of" not in calibration_note(low, scored)
    assert ", which contains 0 of" in calibration_note(low, [low.tokenizer.encode(books_text()[20_000:20_400])])


def test_a_seed_without_rows_is_refused(model, tmp_path):
    with pytest.raises(UsageError, match="seed affects only rows of a JSONL file or dataset"):
        diffquant.quantize(model, tmp_path / "low", "4:g16", rounding="gptq", tokens=64, seed=1)
    with pytest.raises(UsageError, match="mse has no seed"):
        diffquant.quantize(model, tmp_path / "low", "4:g16", seed=1)


def quantize_by_gptq(model, output, *options, **environment):
    """Run the command line in a process of its own, with this environment."""
    command = f"-m diffquant quantize {model} -o {output} --weights 4:g16 --rounding gptq --dataset".split()
    return subprocess.run(
        [sys.executable, *command, *options], env=os.environ | environment, capture_output=True, text=True
    )


def test_the_command_line_takes_a_dataset_offline(hub, model, tmp_path):
    places = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    options = ["someone/chats:short:train", "--samples", "4", "--sequence-length", "32"]
    done = quantize_by_gptq(model, tmp_path / "low", *options, HF_HUB_OFFLINE="1", **places)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "low/diffquant.json").read_text())["rounding"]
    assert (record["samples"], record["tokens"]) == (4, 128)
    assert record["sources"][0]["name"] == "someone/chats:short:train"


def test_a_missing_library_is_exit_5_with_the_command(model, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/datasets.py").write_text("raise ImportError('no datasets')")
    places = os.pathsep.join([str(tmp_path / "without"), os.getcwd()])
    done = quantize_by_gptq(model, tmp_path / "low", "someone/chats", PYTHONPATH=places)
    assert done.returncode == 5, done.stderr
    assert "pip install" in done.stderr
    assert "[datasets]" in done.stderr


def test_calibrate_and_search_read_chats(model, chat_file, tmp_path):
    diffquant.calibrate(model, tmp_path / "scales.safetensors", text=chat_file, tokens=256, window=32)
    given = {"bits": "8,4", "granularity": "g16", "windows": 2, "window": 32, "characters": 400}
    assert diffquant.search(model, tmp_path / "search", 6, text=chat_file, **given).recipe


@pytest.mark.parametrize("verb", ["evaluate", "sweep"])
def test_scores_say_which_text_calibration_read(model, tmp_path, caplog, verb):
    # Another text for each verb, since a warning is given once.
    start = 4000 * (verb == "sweep")
    mine, other = tmp_path / "mine.txt", tmp_path / "other.txt"
    mine.write_text(books_text()[start : start + 4000], encoding="utf-8")
    other.write_text(books_text()[-4000:], encoding="utf-8")
    recipe = {"weights": "4:g16", "rounding": {"name": "gptq", "text": str(mine), "tokens": 64, "window": 32}}
    (tmp_path / "mine.yaml").write_text(Recipe.from_dict(recipe).to_yaml())
    for text in (other, mine):
        assert "give another text" not in caplog.text
        asked = {"text": text, "window": 64, "stride": 64}
        if verb == "sweep":
            recipes = [tmp_path / "mine.yaml"]
            diffquant.sweep(model, tmp_path / text.stem, tasks="perplexity", bits="16", recipes=recipes, **asked)
        else:
            diffquant.evaluate(model, "perplexity", recipe, **asked)
    count = len(open_source(model).tokenizer.encode(mine.read_text(encoding="utf-8")))
    assert f"perplexity: 63 of the text's {count:,} tokens are also calibration data of gptq" in caplog.text


def test_the_bundled_text_fills_each_default_and_no_default_evaluation_scores_it():
    read, scored = calibration_books(), books_text()[-CHARACTERS:]
    for model in pocket_models("prose"):
        assert len(open_source(model).tokenizer.encode(read)) > max(rounding.tokens for rounding in ROUNDINGS.values())
    assert rounding_named("tuned").tokens == 4 * rounding_named("gptq").tokens
    pieces = [scored[place : place + 200] for place in range(0, len(scored) - 200, 200)]
    assert not [piece for piece in pieces if piece in read]
