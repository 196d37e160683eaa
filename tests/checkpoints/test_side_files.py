"""What stands beside the weights goes along, whatever its name; what does not is said, and pointers are refused."""

import json

import pytest
from transformers import AutoTokenizer

from diffquant.checkpoints.gguf import GgufCheckpoint
from diffquant.checkpoints.side_files import TEMPLATES
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import load_text
from diffquant.errors import CheckpointError, UsageError
from diffquant.onnx.exporter import export
from diffquant.quantization.conversion import convert
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint

KEPT = (
    "source.spm", "bpe.codes", "vocab.bpe", "tokenizer.model.v3", "bpe_vocab.txt.gz", "USE_POLICY.md", "COPYING",
    "Notice", "LICENCE.rst", f"{TEMPLATES}/tool_use.jinja",
)  # fmt: skip
LEFT = ("pytorch_model.bin", "model.gguf", "code.ipynb", "build.sh", "consolidated.00.pth")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def llama(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    tiny_lm.tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / TEMPLATES).mkdir()
    for name in (*KEPT, *LEFT):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    (folder / ".gitattributes").write_text("")
    return folder


@pytest.mark.parametrize(
    "write",
    [
        lambda source, out: quantize(source, out, Recipe.of(weights="8:row")),
        lambda source, out: convert(source, out, "diff-v2"),
        export,
    ],
    ids=["quantize", "convert", "export"],
)
def test_everything_but_weights_and_code_goes_along_and_the_rest_is_named(tmp_path, llama, write, caplog):
    write(llama, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in KEPT} == {name: name for name in KEPT}
    assert set(AutoTokenizer.from_pretrained(tmp_path / "out").chat_template) == {"default", "tool_use"}
    (said,) = [record.getMessage() for record in caplog.records if "not copied from" in record.getMessage()]
    for name in ("build.sh", "code.ipynb", "consolidated.00.pth"):
        assert name in said
        assert not (tmp_path / "out" / name).exists()
    assert "config.json" not in said
    assert ".gitattributes" not in said


def test_a_template_is_a_part_of_what_a_folder_is(llama):
    before = open_source(llama).fingerprint
    (llama / TEMPLATES / "tool_use.jinja").write_text("another")
    assert open_source(llama).fingerprint != before


def test_a_template_that_leads_elsewhere_is_refused(tmp_path, llama):
    (tmp_path / "secret").write_text("secret")
    (llama / TEMPLATES / "rag.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"links to files outside it.*rag\.jinja"):
        open_source(llama)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", f"{TEMPLATES}/tool_use.jinja"],
)
def test_a_pointer_of_git_lfs_is_named(llama, name):
    (llama / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name.rpartition('/')[2]} is a pointer of Git LFS"):
        open_source(llama)


def test_so_are_a_gguf_file_and_a_text_that_are_pointers(tmp_path):
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"m\.gguf: is a pointer of Git LFS"):
        GgufCheckpoint(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match=r"m\.gguf is a pointer of Git LFS"):
        load_text(tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("stated", "written"), [("torch.bfloat16", "bfloat16"), ("auto", None)])
def test_a_dtype_as_older_writers_have_it_is_read_and_written_as_transformers_reads_it(
    tmp_path, llama, key, stated, written
):
    config = json.loads((llama / "config.json").read_text())
    config.pop("dtype", None)
    (llama / "config.json").write_text(json.dumps(config | {key: stated}))
    load(llama)
    quantize(llama, tmp_path / "out", Recipe.of(weights="8:row"))
    assert json.loads((tmp_path / "out/config.json").read_text()).get(key) == written


def test_a_dtype_that_torch_does_not_have_is_refused_by_its_name(llama):
    edit_json(llama / "config.json", dtype="fp16")
    with pytest.raises(CheckpointError, match=r"config\.json: dtype is 'fp16', which torch does not have"):
        open_source(llama)
