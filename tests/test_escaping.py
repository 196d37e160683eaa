"""Names that strangers chose, on their way into cards, pages, tables and onto the terminal."""

import csv
import io
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import diffquant
import diffquant.data
from diffquant.checkpoints.weight_source import open_weights
from diffquant.onnx import ExportOptions, export
from diffquant.reports.tables import format_csv
from diffquant.support.terminal import escape_hidden, markdown_code, markdown_text, one_line
from tests.support.checkpoints import write_llama
from tests.support.tables import in_one_test

HOSTILE = {
    "heading": "evil\n\n# Log in at [this page](http://evil.example)\n",
    "html": "<img src=x onerror=alert(1)>",
    "script": "<script>alert(1)<",
    "link": "[a](javascript:alert(1)) ![b](http://evil.example/b.png) www.evil.example <http://evil.example>",
    "code": "a`b`` c",
    "ticks": "```",
    "table": "a|b\\|c|",
    "emphasis": "*a* __b__ ~~c~~ $d$ &lt;e&gt;",
    "front matter": "---\nlicense: evil\n---",
    "title": "model\x1b]0;owned\x07",
    "colour": "\x9b31mred\rblue",
    "direction": "abc\u202etxt.exe\u2066",
}
HARMLESS = "harmless"
HIDDEN = {chr(code) for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F), 0x2066)}
each_name = in_one_test("name", HOSTILE.values())


class Tags(HTMLParser):
    """The tags of a document with their attributes' names, drawings left out; classes where they differ."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text, self._depth = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._depth += tag in ("svg", "style", "script")
        if not self._depth:
            self.found.append((tag, sorted(name for name, _ in attributes)))

    def handle_endtag(self, tag):
        self._depth -= tag in ("svg", "style", "script")

    def handle_data(self, data):
        self.text.append(data)


def rendered(card):
    """The tags and the text of a card as a reader that takes HTML and tables shows it."""
    shown = Tags(MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(card))
    return shown.found, "".join(shown.text)


def body_of(card):
    assert card.startswith("---\n")
    return card.split("\n---\n", 1)[1]


def unknown_model(folder, model_type="of-no-name", tensor="model.layers.0.self_attn.q_proj.weight"):
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    save_file(
        {tensor: torch.randn(64, 64), "model.embed_tokens.weight": torch.randn(40, 64)}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def file_name(name):
    return name.replace("/", "∕")


def copy_tokenizer(folder):
    pocket = Path(diffquant.data.__file__).parent / "pocket/prose-transformer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket / name, folder / name)


@each_name
def test_a_card_keeps_its_structure_whatever_a_model_is_called(tmp_path, name):
    cards = []
    for folder in (
        unknown_model(tmp_path / "a" / file_name(name), name),
        unknown_model(tmp_path / "b" / HARMLESS, HARMLESS),
    ):
        diffquant.quantize(open_weights(folder), tmp_path / "out", {"weights": "4:g32"}, overwrite=True)
        cards.append(body_of((tmp_path / "out/README.md").read_text()))
    tags, text = rendered(cards[0])
    assert tags == rendered(cards[1])[0]
    assert not HIDDEN & set(cards[0])
    shown = one_line(file_name(name)).strip()
    assert " ".join(shown.split()) in " ".join(text.split())


@each_name
def test_cards_of_conversions_and_exports_keep_theirs(tmp_path, name):
    cards = {}
    for kind, folder_name in (("a", file_name(name)), ("b", HARMLESS)):
        llama = write_llama(tmp_path / kind / folder_name, num_hidden_layers=1)
        diffquant.convert(llama, tmp_path / kind / "out", "diff-v2")
        export(llama, tmp_path / kind / "onnx", ExportOptions())
        cards[kind] = [body_of((tmp_path / kind / part / "README.md").read_text()) for part in ("out", "onnx")]
    for hostile, harmless in zip(cards["a"], cards["b"], strict=True):
        assert rendered(hostile)[0] == rendered(harmless)[0]
        assert not HIDDEN & set(hostile)


@each_name
def test_the_terminal_gets_no_hidden_character(tmp_path, run, name):
    folder = unknown_model(tmp_path / file_name(name), name, f"model.{name}.weight")
    for arguments in (
        ("quantize", folder, "-o", tmp_path / "out", "--weights", "4:g32"),
        ("quantize", folder, "-o", tmp_path / "again", "--weights", "4:g32", "--dry-run"),
        ("inspect", folder),
        ("inspect", folder, "--json"),
        ("eval", folder),
        ("inspect", tmp_path / f"no{file_name(name)}"),
        ("quantize", folder, "-o", tmp_path / "kept", "--weights", "4", "--keep", name),
    ):
        _, out, err = run(*arguments)
        said = out + err
        assert said
        assert not HIDDEN & set(said), arguments
        assert "\r" not in said


def test_the_summary_of_a_run_has_a_line_for_each_tensor(tmp_path):
    source = open_weights(unknown_model(tmp_path / "model", tensor="a\nb\x1b]0;owned\x07.weight"))
    assert len(diffquant.quantize(source, tmp_path / "out", {"weights": "4:g32"}).summary().splitlines()) == 3


def test_progress_lines_are_drawn_as_before(monkeypatch, capsys):
    from diffquant.support.terminal import escape_streams

    with escape_streams():
        sys.stderr.write("\rhalf")
        sys.stderr.write("\n\x1b[A")
        sys.stderr.write("\r\x1b[K")
        sys.stderr.write("\x1b[Aup\x1b[31m")
        sys.stderr.writelines(["a\x07", "b"])
        assert not sys.stderr.isatty()
    sys.stderr.write("\x1b")
    assert capsys.readouterr().err == "\rhalf\n\x1b[A\r\x1b[K\x1b[Aup\\u001b[31ma\\u0007b\x1b"


@each_name
def test_a_page_and_a_table_keep_their_structure(tmp_path, name):
    options = {"bits": "16", "characters": 200, "window": 32, "stride": 32}
    pages = []
    for kind, folder_name in (("a", file_name(name)), ("b", HARMLESS)):
        llama = write_llama(tmp_path / kind / folder_name, num_hidden_layers=1, vocab_size=2048)
        copy_tokenizer(llama)
        diffquant.sweep(llama, tmp_path / kind / "out", "perplexity", **options)
        pages.append((tmp_path / kind / "out/report.html").read_text())
        table = (tmp_path / kind / "out/table.csv").read_text()
        assert not HIDDEN & set(table)
        assert len(table.splitlines()) == 2
    assert Tags(pages[0]).found == Tags(pages[1]).found
    assert not HIDDEN & set(pages[0])


@each_name
def test_a_cell_of_csv_is_one_line_that_no_spreadsheet_computes(name):
    for text in (name, "=1+1", " =1+1", "\t=1+1", "\r\n@x"):
        (cell,) = list(csv.DictReader(io.StringIO(format_csv([{"model": text}]))))
        assert cell["model"].removeprefix("'") == one_line(text)
        assert not cell["model"].startswith(tuple("=+-@ \t\r"))


@each_name
def test_a_name_is_read_back_from_markdown(name):
    for write, tag in ((markdown_text, "p"), (markdown_code, "code")):
        tags, text = rendered(f"x {write(name)} y")
        assert {found for found, _ in tags} <= {"p", tag}
        assert text.strip() == f"x {one_line(name)} y"
        cells, _ = rendered(f"| a | b |\n|---|---|\n| {write(name)} | 2 |\n")
        assert [found for found, _ in cells].count("td") == 2


def test_json_that_is_made_visible_is_the_same_json():
    content = json.dumps(list(HOSTILE.values()), ensure_ascii=False)
    assert json.loads(escape_hidden(content)) == list(HOSTILE.values())
