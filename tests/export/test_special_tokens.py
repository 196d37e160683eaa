"""Which tokens end a text, wherever it is made: transformers' `generate` on the same folder is the oracle."""

import json
import shutil

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM, AutoTokenizer

import diffquant
from diffquant.errors import CheckpointError
from diffquant.measure.protocols.harness_plugin import HarnessModel
from diffquant.measure.torch_model import TorchModel
from diffquant.onnx import ExportOptions, Generator, export
from diffquant.onnx.runtime.generation import FolderTokenizer
from diffquant.onnx.runtime.scoring import OnnxLanguageModel
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.quantization.conversion import convert
from diffquant.support.progress import report_nothing
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint

TEXT, NEW = "He took the", 12
PROMPT = tiny_lm.tokenizer()(TEXT).input_ids


def continued(model):
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return made[0, len(PROMPT) :].tolist()


def settle(folder, entries):
    """Write generation_config.json anew."""
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A checkpoint whose settings end no text, and its greedy continuation by transformers."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_checkpoint(folder, "llama", vocab_size=tiny_lm.WORDS, eos_token_id=1, initializer_range=0.3)
    tiny_lm.tokenizer().save_pretrained(settle(folder, {}))
    return folder, continued(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture
def source(endless, tmp_path):
    return shutil.copytree(endless[0], tmp_path / "source")


@pytest.fixture(scope="module")
def stop(endless):
    """The fifth token of the continuation, which comes there first."""
    greedy = endless[1]
    assert (greedy.index(greedy[4]), len(greedy)) == (4, NEW)
    return greedy[4]


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"eos_token_id": [1, "stop"], "pad_token_id": 3, "bos_token_id": 2}, {}),
        ({"eos_token_id": "stop"}, {}),
        ({"eos_token_id": None}, {"eos_token_id": "stop"}),
        ({"temperature": 0.5}, {"eos_token_id": "stop"}),
        (None, {"eos_token_id": "stop"}),
        (None, {"eos_token_id": [1, "stop"]}),
        (None, {"eos_token_id": None}),
        (None, {"eos_token_id": "unsaid"}),
    ],
    ids=["list", "number", "null", "none said", "config", "config list", "config null", "config silent"],
)
def test_texts_end_where_transformers_ends_them(source, stop, tmp_path, generation, config):
    generation, config = json.loads(json.dumps([generation, config]).replace('"stop"', str(stop)))
    edit_json(source / "config.json", **config)
    if config.get("eos_token_id") == "unsaid":
        stated = json.loads((source / "config.json").read_text())
        del stated["eos_token_id"]
        (source / "config.json").write_text(json.dumps(stated))
    if generation is None:
        (source / "generation_config.json").unlink()
    else:
        settle(source, generation)
    theirs, model = AutoModelForCausalLM.from_pretrained(source), diffquant.load(source)
    wanted, eos = continued(theirs), theirs.generation_config.eos_token_id
    assert continued(model) == wanted
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.generation_config, name) == getattr(theirs.generation_config, name)
    out = tmp_path / "out"
    export(source, out)
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    before_end = [token for token in wanted if token not in ends]
    assert list(Generator(out, 1).generate_tokens(PROMPT, NEW)) == before_end
    assert json.loads((out / "genai_config.json").read_text())["model"]["eos_token_id"] == ends
    tokenizer = tiny_lm.tokenizer()
    onnx = OnnxLanguageModel(OnnxModel(out, 1, every_position=True), tokenizer)
    for each, expected in ((TorchModel(model, tokenizer), wanted), (onnx, before_end)):
        assert each.generate(PROMPT, NEW, ["\n\n\n"], {}) == expected


def test_an_end_is_no_part_of_the_text_though_the_tokenizer_takes_it_for_a_word(source, tmp_path):
    tokenizer, prompt = tiny_lm.tokenizer(), tiny_lm.tokenizer().decode(PROMPT)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    greedy = diffquant.load(source).generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    end = next(token for token in greedy[1:] if token not in tokenizer.all_special_ids and token != greedy[0])
    before = tokenizer.decode(greedy[: greedy.index(end)])
    settle(source, {"eos_token_id": [1, end]})
    assert diffquant.generate(source, prompt, max_new_tokens=NEW) == before
    export(source, tmp_path / "out")
    assert diffquant.run(tmp_path / "out", prompt, max_new_tokens=NEW) == before


def by_genai(folder):
    """The greedy continuation of the prompt."""
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPT) + NEW, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([PROMPT], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0))[len(PROMPT) :]


def test_genai_stops_at_each_of_several_ends(source, endless, stop, tmp_path):
    export(settle(source, {"eos_token_id": [1, stop]}), tmp_path / "out")
    assert by_genai(tmp_path / "out") == endless[1][:4]


def test_genai_takes_ends_and_padding_that_the_vocabulary_does_not_have(source, endless, stop, tmp_path):
    beyond = {"eos_token_id": [-1, stop, tiny_lm.WORDS], "pad_token_id": tiny_lm.WORDS + 7}
    export(settle(source, beyond), tmp_path / "out")
    assert by_genai(tmp_path / "out") == endless[1][:4]
    edit_json(source / "generation_config.json", eos_token_id=tiny_lm.WORDS, bos_token_id=-1)
    export(source, tmp_path / "endless")
    assert by_genai(tmp_path / "endless") == endless[1]


@pytest.mark.parametrize("bos", [0, None])
def test_genai_goes_on_where_no_token_ends_a_text(source, endless, tmp_path, bos):
    """Where no token ends a text, it ends at the one with which it pads."""
    export(settle(source, {"bos_token_id": bos}), tmp_path / "out")
    pad = json.loads((tmp_path / "out" / "genai_config.json").read_text())["model"]["pad_token_id"]
    assert pad == (tiny_lm.WORDS - 1 if bos is None else bos)
    assert by_genai(tmp_path / "out") == endless[1]


def test_every_folder_that_is_made_of_a_checkpoint_ends_texts_where_it_does(source, stop, tmp_path):
    settle(source, {"eos_token_id": [1, stop], "temperature": 0.6})
    quantized, v2, of_quantized, of_v2 = (tmp_path / name for name in ("quantized", "v2", "onnx", "web"))
    diffquant.quantize(source, quantized, "8:row")
    convert(source, v2, "diff-v2")
    export(quantized, of_quantized)
    export(v2, of_v2, ExportOptions(web=True))
    for folder in (quantized, v2, of_quantized, of_v2):
        assert (folder / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert diffquant.load(quantized).generation_config.eos_token_id == [1, stop]
    assert json.loads((of_v2 / "web.json").read_text())["ends"] == [1, stop]
    made = list(Generator(of_v2, 1).generate_tokens(PROMPT, NEW))
    assert made == continued(diffquant.load(v2))[:-1]
    assert len(made) == 4


def test_settings_of_sampling_change_neither_texts_nor_evaluations(source, endless, tmp_path):
    sampling = {"do_sample": True, "temperature": 9.0, "top_k": 0, "repetition_penalty": 3.0, "min_new_tokens": 3}
    tokenizer, wanted = tiny_lm.tokenizer(), tiny_lm.tokenizer().decode(endless[1], skip_special_tokens=True)
    model = diffquant.load(settle(source, sampling))
    assert diffquant.generate(model, TEXT, tokenizer=tokenizer, max_new_tokens=NEW) == wanted
    assert (
        continued(model) == endless[1] == model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW)[0, -NEW:].tolist()
    )
    export(source, tmp_path / "out")
    assert "".join(Generator(tmp_path / "out", 1).stream(TEXT, NEW)) == wanted
    asked = Instance("generate_until", {}, (TEXT, {"until": ["\n\n\n"], "max_gen_toks": NEW}), 0)
    # One that samples by itself is a model of transformers' own.
    sampler = AutoModelForCausalLM.from_pretrained(settle(source, sampling | {"repetition_penalty": 1.0}))
    for each in (
        TorchModel(model, tokenizer),
        TorchModel(sampler, tokenizer),
        OnnxLanguageModel(OnnxModel(tmp_path / "out", 1, every_position=True), tokenizer),
    ):
        assert HarnessModel(each, 256, report_nothing).generate_until([asked]) == [wanted]
        assert each.generate(PROMPT, NEW, ["\n\n\n"], {}) == endless[1]


@pytest.mark.parametrize("added", [lambda token: token | {"special": False}, lambda _: None], ids=["plain", "absent"])
def test_tokens_with_a_role_are_special_as_in_transformers_whatever_tokenizer_json_marks(source, added):
    stored = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    edit_json(source / "tokenizer.json", added_tokens=[token for each in stored if (token := added(each))])
    ours, theirs = FolderTokenizer(source), AutoTokenizer.from_pretrained(source)
    text = "<s>He took the</s> book"
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(theirs(text).input_ids) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "7"}', "eos_token_id is '7', which is not a token id"),
        ('{"eos_token_id": [[1]], "pad_token_id": true}', r"eos_token_id is \[\[1\]\], pad_token_id is True"),
        ("{", "cannot read"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_name(source, tmp_path, content, message):
    (source / "generation_config.json").write_text(content)
    for call in (lambda: diffquant.load(source), lambda: export(source, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message) as caught:
            call()
        assert str(source / "generation_config.json") in str(caught.value)
    assert not (tmp_path / "out").exists()
