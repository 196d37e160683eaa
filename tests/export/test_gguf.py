"""Exports to GGUF, read back by gguf's own reader, by transformers and by diffquant; tests/llama_cpp has llama.cpp."""

import json
import lzma

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import diffquant
from diffquant.checkpoints.gguf import GgufCheckpoint
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, DiffQuantError, OutputExistsError, UsageError
from diffquant.onnx.gguf.writer import pack_blocks
from diffquant.verbs import cli
from tests.llama_cpp.cases import PREFIXES, RECORDED, SPLITS, TEXTS, write_tokenizer
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.tiny_lm import WIDER, tokenizer
from tests.support.tiny_lm import llama as llama_model

IDS = torch.randint(0, 400, (1, 40), generator=torch.Generator().manual_seed(0))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
RECORD = json.loads(lzma.decompress(RECORDED.read_bytes()))["tokens"]


def write_llama(folder, dtype=torch.bfloat16, tokens=None, **changes):
    """A random Llama with a tokenizer."""
    llama_model(**(WIDER | {"tie_word_embeddings": False} | changes)).to(dtype).save_pretrained(folder)
    (tokens or tokenizer(adds_bos=True)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("gguf") / "llama")


def logits(path):
    return diffquant.load(path, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_blocks_are_what_gguf_dequantizes(bits):
    generator = torch.Generator().manual_seed(bits)
    lowest = -(1 << bits - 1)
    codes = torch.randint(lowest, -lowest, (6, 128), generator=generator, dtype=torch.int8)
    codes[0, :2] = torch.tensor([lowest, -lowest - 1])
    scales = torch.rand(6, 2, generator=generator).half()
    kind = {4: GGMLQuantizationType.Q4_0, 5: GGMLQuantizationType.Q5_0, 8: GGMLQuantizationType.Q8_0}[bits]
    found = quants.dequantize(pack_blocks(codes, scales, bits), kind)
    np.testing.assert_array_equal(found, (codes * scales.float().repeat_interleave(64, 1)).numpy())


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ({"weights": "4:g32"}, ["Q4_0"]),
        ({"weights": "4:row"}, ["Q4_0"]),
        ({"weights": "5:g32"}, ["Q5_0"]),
        ({"weights": "8:g32"}, ["Q8_0"]),
        ({"weights": "8:row", "kv": 8, "logits": "6:row"}, ["Q8_0"]),
        ({"weights": "8:tensor"}, ["Q8_0"]),
        ({"weights": "5:g32", "overrides": {"*.o_proj": "8:row", "*.v_proj": "16"}}, ["Q5_0", "Q8_0", "BF16"]),
    ],
    ids=str,
)
def test_a_quantized_llama_is_read_back_without_a_difference(tmp_path, llama, recipe, kinds):
    diffquant.quantize(llama, tmp_path / "q", recipe)
    report = diffquant.export(tmp_path / "q", tmp_path / "q.gguf", to="gguf")
    assert set(report.types) == {*kinds, "BF16", "F32"}
    assert report.bytes_after == (tmp_path / "q.gguf").stat().st_size
    assert not any("rounded" in note for note in report.notes)
    assert any("k 8" in note and "logits 6:row" in note for note in report.notes) == ("kv" in recipe)
    assert torch.equal(
        logits(tmp_path / "q.gguf"),
        diffquant.load(tmp_path / "q", dtype=torch.float32, recipe={"kv": 16, "logits": 16})(IDS).logits
        if "kv" in recipe
        else logits(tmp_path / "q"),
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q.gguf", dtype=torch.float32)
    torch.testing.assert_close(theirs(IDS).logits, logits(tmp_path / "q.gguf"), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_tensors_are_those_of_the_source(tmp_path, dtype, tied):
    write_llama(tmp_path / "llama", getattr(torch, dtype), tie_word_embeddings=tied)
    diffquant.export(tmp_path / "llama", tmp_path / "plain.gguf", to="gguf")
    expected = load_file(tmp_path / "llama/model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="plain.gguf", dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "plain.gguf").tensors}
    assert kinds["token_embd.weight"] == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    assert ("output.weight" in kinds) != tied
    assert {kinds[name] for name in kinds if "norm" in name} == {"F32"}


def test_weights_are_rounded_as_quantize_does_by_nearest(tmp_path, llama):
    diffquant.quantize(llama, tmp_path / "q", {"weights": "4:g32", "rounding": "nearest"})
    diffquant.export(tmp_path / "q", tmp_path / "two.gguf", to="gguf")
    report = diffquant.export(llama, tmp_path / "one.gguf", to="gguf", weights="4")
    assert torch.equal(logits(tmp_path / "one.gguf"), logits(tmp_path / "two.gguf"))
    small = diffquant.export(llama, tmp_path / "small.gguf", to="gguf", weights="4", embed=8, dtype="float16")
    assert (report.types["BF16"], small.types["Q8_0"]) == (2, 2)
    assert "F16" not in small.types


def test_quantize_writes_the_file_in_one_command(tmp_path, llama):
    recipe = {"weights": "5:g32"}
    diffquant.quantize(llama, tmp_path / "one", recipe)
    diffquant.export(tmp_path / "one", tmp_path / "two.gguf", to="gguf")
    report = diffquant.quantize(llama, tmp_path / "one.gguf", recipe, to="gguf")
    assert (report.destination, report.bytes_after) == (tmp_path / "one.gguf", (tmp_path / "one.gguf").stat().st_size)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one.gguf", "two.gguf"]
    done = CliRunner().invoke(
        cli.app, ["quantize", str(llama), "-o", str(tmp_path / "cli"), "--weights", "8:row", "--to", "gguf"]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "cli/cli-Q8_0.gguf").is_file()
    with pytest.raises(CheckpointError, match=r"no GGUF type stores 6:g32 \("):
        diffquant.quantize(llama, tmp_path / "six.gguf", {"weights": "6:g32"}, to="gguf")
    assert not any("six" in path.name or path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 2.5, "attention_factor": 0.7, "rope_theta": 10000.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3,
        {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 12.0},
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)  # fmt: skip
def test_rotary_settings_come_back(tmp_path, rope):
    write_llama(tmp_path / "llama", torch.float32, rope_parameters=rope)
    diffquant.export(tmp_path / "llama", tmp_path / "rope.gguf", to="gguf")
    torch.testing.assert_close(logits(tmp_path / "rope.gguf"), logits(tmp_path / "llama"), rtol=0, atol=1e-5)
    if rope.get("low_freq_factor") != 2:  # the divisors do not show it
        found = GgufCheckpoint(tmp_path / "rope.gguf").config["rope_parameters"]
        assert found == pytest.approx(rope) if "attention_factor" in rope else found == rope
    if "attention_factor" in rope:  # times which llama.cpp has 0.1 ln(factor) + 1
        stored = GGUFReader(tmp_path / "rope.gguf").fields["llama.rope.scaling.attn_factor"].contents()
        assert stored * (0.1 * np.log(rope["factor"]) + 1) == pytest.approx(rope["attention_factor"])


@pytest.mark.parametrize("place", range(len(SPLITS) + len(PREFIXES)), ids=map(str, (*SPLITS, *PREFIXES)))
def test_a_tokenizer_makes_the_tokens_that_llama_cpp_made_with_it(tmp_path, place):
    read = diffquant.load_tokenizer(write_tokenizer(place, tmp_path))
    folder = write_llama(tmp_path / "llama", tokens=read, vocab_size=len(read) + 3, eos_token_id=0, hidden_size=32)
    report = diffquant.export(folder, tmp_path / "again.gguf", to="gguf")
    assert report.notes == ()
    again = diffquant.load_tokenizer(tmp_path / "again.gguf")
    for text, tokens in zip(TEXTS, RECORD[place]["tokens"], strict=True):
        assert again.encode(text, add_special_tokens=False) == tokens
        assert again.encode(text) == [1] * RECORD[place]["begins"] + tokens
    fields = GGUFReader(tmp_path / "again.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{len(read) + 2}]"
    assert fields["tokenizer.ggml.token_type"].contents()[-1] == 5


def test_a_files_tokens_are_all_that_its_tokenizer_has(tmp_path, llama):
    """transformers adds GPT-2's end of text, which a model of another vocabulary has no embedding for."""
    diffquant.export(llama, tmp_path / "llama.gguf", to="gguf")
    diffquant.quantize(tmp_path / "llama.gguf", tmp_path / "back", {"weights": "8:row"})
    own = diffquant.load_tokenizer(llama)
    for place in ("llama.gguf", "back"):
        read = diffquant.load_tokenizer(tmp_path / place)
        assert read.encode("one <|endoftext|> two </s>") == own.encode("one <|endoftext|> two </s>")
        assert read.get_vocab() == own.get_vocab()


def test_what_a_model_says_of_itself_comes_along(tmp_path):
    made = tokenizer(adds_bos=True)
    made.chat_template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    write_llama(tmp_path / "llama", tokens=made, eos_token_id=[1, 5])
    (tmp_path / "llama/generation_config.json").unlink(missing_ok=True)
    card = "license: other\nlicense_name: own\nlicense_link: https://a.b/c\nlanguage: [en, fr]\nbase_model: org/base\n"
    (tmp_path / "llama/README.md").write_text(f"---\n{card}---\n# A model\n")
    report = diffquant.export(tmp_path / "llama", tmp_path / "out", to="gguf", weights="8:row")
    assert report.file == tmp_path / "out/llama-Q8_0.gguf"
    source, found = open_source(tmp_path / "llama"), GgufCheckpoint(report.file)
    assert found.front_matter == source.checkpoint.front_matter
    assert found.config["eos_token_id"] == [1, 5]
    chat = [{"role": "user", "content": "Hi"}]
    assert found.tokenizer.apply_chat_template(chat, tokenize=False) == "<s>Hi"
    fields = {name: field.contents() for name, field in GGUFReader(report.file).fields.items()}
    assert (fields["general.name"], fields["general.file_type"]) == ("llama", 7)
    assert (fields["general.base_model.0.name"], fields["tokenizer.ggml.add_bos_token"]) == ("base", True)
    written = (tmp_path / "out/README.md").read_text()
    assert "base_model: org/base" in written
    assert "base_model_relation: quantized" in written
    assert "llama-server -m llama-Q8_0.gguf" in written
    record = json.loads((tmp_path / "out/diffquant.json").read_text())
    assert record["files"] == ["README.md", "diffquant.json", "llama-Q8_0.gguf"]


def test_scales_that_float16_does_not_hold_are_told(tmp_path, llama):
    diffquant.quantize(llama, tmp_path / "q", {"weights": "8:row"})
    file = tmp_path / "q/model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name][:3] = torch.tensor([[1.0078125 * 2**-20], [2.0**-20], [2.0**-30]])
    save_file(tensors, file, {"format": "pt"})
    report = diffquant.export(tmp_path / "q", tmp_path / "q.gguf", to="gguf")
    # 2^-30 becomes 0, and of 1.0078125 float16 has no last bit there.
    assert "2 scales are rounded to float16, with a relative error of 1 at most" in report.notes
    tensors[name][0] = 2.0**20
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has a scale of 1.04858e\+06"):
        diffquant.export(tmp_path / "q", tmp_path / "large.gguf", to="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "q.gguf"]


@pytest.mark.parametrize("family", ["diffllama", "unilm-v1", "unilm-v2", "motif", "motif3", "phi4flash"])
def test_models_that_no_engine_runs_are_refused_by_name(tmp_path, family):
    write_checkpoint(tmp_path / "model", family)
    kind = json.loads((tmp_path / "model/config.json").read_text())["model_type"]
    with pytest.raises(CheckpointError, match=rf"no engine that reads GGUF runs {kind} \(.*DIFF V"):
        diffquant.export(tmp_path / "model", tmp_path / "out.gguf", to="gguf")


@pytest.mark.parametrize("scheme", ["2:g32", "3:g32", "6:row", "7:g32", "4:g16", "nvfp4", "mxfp4", "e4m3:row"])
def test_schemes_without_a_block_are_refused_by_name(tmp_path, llama, scheme):
    diffquant.quantize(llama, tmp_path / "q", {"weights": scheme})
    with pytest.raises(CheckpointError, match=rf"stores {scheme} \(of model\.layers\.0\.self_attn\.q_proj\.weight, "):
        diffquant.export(tmp_path / "q", tmp_path / "out.gguf", to="gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "it has attention_bias"),
        ({"mlp_bias": True}, "it has mlp_bias"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "its rope_type dynamic"),
        ({"rope_parameters": YARN | {"beta_fast": 16}}, "its rope_type yarn with beta_fast 16"),
        ({"vocab_size": 390}, "it has a token 399, and the embedding has 390 rows"),
        ({"intermediate_size": 80}, r"4:row in rows of 80 \(of model\.layers\.0\.mlp\.down_proj\.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_llamas_that_a_file_cannot_hold_are_refused(tmp_path, changes, message):
    write_llama(tmp_path / "llama", **changes)
    # Groups of 16 divide a width of 80, and blocks do not.
    weights = "4:row" if "intermediate_size" in changes else 16
    with pytest.raises(CheckpointError, match=message):
        diffquant.export(tmp_path / "llama", tmp_path / "out.gguf", to="gguf", weights=weights)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def broken(part, value):
    """A tokenizer that llama.cpp has no equal of."""
    made = Tokenizer.from_str(tokenizer(adds_bos=True).backend_tokenizer.to_str())
    setattr(made, part, value)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def of_words():
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (lambda: broken("normalizer", normalizers.Lowercase()), "llama.cpp has no BPE with .*Lowercase"),
        (lambda: broken("pre_tokenizer", None), "no known pre-tokenizer that splits text by null"),
        (of_words, "it is of type WordLevel"),
    ],
    ids=["lower case", "unsplit", "words"],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(tmp_path, tokens, message):
    write_llama(tmp_path / "llama", tokens=tokens())
    with pytest.raises(CheckpointError, match=message):
        diffquant.export(tmp_path / "llama", tmp_path / "out.gguf", to="gguf")


def test_a_text_without_an_end_is_refused(tmp_path):
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    write_llama(tmp_path / "llama", tokens=made, eos_token_id=None)
    edit_json(tmp_path / "llama/generation_config.json", eos_token_id=None)
    with pytest.raises(CheckpointError, match="no token that ends a text"):
        diffquant.export(tmp_path / "llama", tmp_path / "out.gguf", to="gguf")


def test_what_diffquant_did_not_write_is_never_replaced(tmp_path, llama):
    file, folder = tmp_path / "out.gguf", tmp_path / "out"
    for output in (file, folder):
        diffquant.export(llama, output, to="gguf")
        with pytest.raises(OutputExistsError, match="exists"):
            diffquant.export(llama, output, to="gguf", weights="8:row")
        diffquant.export(llama, output, to="gguf", weights="8:row", overwrite=True)
    assert [path.name for path in folder.glob("*.gguf")] == ["llama-Q8_0.gguf"]
    assert torch.equal(logits(file), logits(folder / "llama-Q8_0.gguf"))
    file.write_bytes(b"GGUF of someone else")
    with pytest.raises(OutputExistsError, match="did not write"):
        diffquant.export(llama, file, to="gguf", overwrite=True)
    with pytest.raises(UsageError, match="is the input"):
        diffquant.export(folder / "llama-Q8_0.gguf", folder / "llama-Q8_0.gguf", to="gguf", overwrite=True)


def test_a_failure_leaves_the_old_file(tmp_path, llama, monkeypatch):
    file = tmp_path / "out.gguf"
    diffquant.export(llama, file, to="gguf")
    before = file.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "empty", fail)
    with pytest.raises(DiffQuantError, match="No space left on device; no partial file is kept"):
        diffquant.export(llama, file, to="gguf", overwrite=True)
    assert ([path.name for path in tmp_path.iterdir()], file.read_bytes()) == (["out.gguf"], before)


def test_a_gguf_file_is_written_again_as_it_is_read(tmp_path, llama):
    diffquant.export(llama, tmp_path / "one.gguf", to="gguf")
    report = diffquant.export(tmp_path / "one.gguf", tmp_path / "two.gguf", to="gguf")
    assert torch.equal(logits(tmp_path / "one.gguf"), logits(tmp_path / "two.gguf"))
    assert report.notes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": 8}, "kv: a GGUF file cannot store this"),
        ({"cache": False, "web": True}, "cache, web: a GGUF file"),
        ({"embed": 4}, "embed=4: a GGUF file's embedding and head take 8 or 16 bits"),
        ({"to": "gguff"}, "unknown format 'gguff'; did you mean 'gguf'"),
        ({"push": "org/name"}, "uploads a folder"),
        ({"weights": "8:row"}, "has quantized weights already"),
    ],
    ids=str,
)
def test_options_without_a_place_in_the_file_are_refused(tmp_path, llama, options, message):
    diffquant.quantize(llama, tmp_path / "q", {"weights": "8:row"})
    with pytest.raises(UsageError, match=message):
        diffquant.export(tmp_path / "q", tmp_path / "out.gguf", **{"to": "gguf"} | options)
