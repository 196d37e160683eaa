"""A folder's tokenizer.json says alone how its text is split, whatever transformers makes of the class beside it."""

import json
import logging

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import diffquant
from diffquant import data
from diffquant.checkpoints.tokenizer import explain_tokenizer_difference, load_tokenizer
from diffquant.errors import CheckpointError
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Not those that the loader tries.
TEXTS = (
    "It was 31415926, and he'll SAY'LL so.",
    "   three   spaces \t tabs\r\n\r\n\n end  ",
    "x=[10,200];\n\n    return y_2  # ok",
    "na\u00efve nai\u0308ve \ufb02 \u2460 \u4f60\u597d \U0001f600",
    data.books_text()[5000:9000],
)
BYTES = decoders.ByteLevel()


def plain_bytes(*before):
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


KINDS = {
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, BYTES),
    "llama3": (plain_bytes(pre_tokenizers.Split(Regex(LLAMA_3), "isolated")), None, BYTES),
    "nfc": (plain_bytes(pre_tokenizers.Digits(individual_digits=True)), normalizers.NFKC(), BYTES),
    "metaspace": (pre_tokenizers.Metaspace(), None, decoders.Metaspace()),
}
CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer",
    "GPTNeoXTokenizerFast", "CohereTokenizer", "RobertaTokenizer", "BertTokenizer", "WhisperTokenizer", "XGLMTokenizer",
    "ByT5Tokenizer", "CanineTokenizer", "MarianTokenizer", "PreTrainedTokenizerFast", "NotThere",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers():
    """A tokenizer of each kind."""
    made = {}
    for kind, (split, normalizer, decoder) in KINDS.items():
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = split, decoder
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        alphabet = [] if kind == "metaspace" else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([data.books_text()[:20000]], trainer)
        made[kind] = tokenizer
    return made


def write(folder, tokenizer, model_type="llama", **settings):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    stated = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def reads_alike(tokenizer, oracle):
    return all(
        tokenizer.encode(text) == oracle.encode(text).ids
        and tokenizer.decode(oracle.encode(text).ids) == oracle.decode(oracle.encode(text).ids, False)
        for text in TEXTS
    )


@pytest.mark.parametrize("kind", sampled(KINDS, 3))
def test_text_is_read_as_the_file_says_whatever_class_is_named(tmp_path, tokenizers, kind):
    oracle = tokenizers[kind]
    for name in CLASSES:
        tokenizer = load_tokenizer(write(tmp_path / name, oracle, tokenizer_class=name))
        assert reads_alike(tokenizer, oracle), name
        assert len(tokenizer) == oracle.get_vocab_size(), name
        assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2), name


@in_one_test("model_type", ["llama", "qwen2", "gpt2", "gemma", "diffllama", "of-nobody"])
def test_nor_does_the_class_of_a_model_type_change_it(tmp_path, tokenizers, model_type):
    folder = write(tmp_path / "model", tokenizers["llama3"], model_type)
    assert reads_alike(load_tokenizer(folder), tokenizers["llama3"])


def test_what_is_read_otherwise_by_the_class_is_said_and_nothing_where_it_agrees(tmp_path, tokenizers, caplog):
    load_tokenizer(write(tmp_path / "agrees", tokenizers["gpt2"], tokenizer_class="GPT2Tokenizer"))
    load_tokenizer(write(tmp_path / "plain", tokenizers["llama3"], tokenizer_class="PreTrainedTokenizerFast"))
    assert not caplog.records
    load_tokenizer(write(tmp_path / "differs", tokenizers["llama3"], tokenizer_class="Qwen2Tokenizer"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "differs: text is split by tokenizer.json" in record.getMessage()
    assert "Qwen2Tokenizer would encode" in record.getMessage()
    # As `serve` says of vLLM, which loads the class.
    assert explain_tokenizer_difference(tmp_path / "differs") in record.getMessage()
    assert explain_tokenizer_difference(tmp_path / "agrees") == ""


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_the_file_says_whether_texts_begin_with_bos(tmp_path, tokenizers, settings):
    oracle = Tokenizer.from_str(tokenizers["llama3"].to_str())
    oracle.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = load_tokenizer(write(tmp_path / "model", oracle, tokenizer_class="Qwen2Tokenizer", **settings))
    for begins in (True, False):
        assert (
            tokenizer.encode(TEXTS[0], add_special_tokens=begins)
            == oracle.encode(TEXTS[0], add_special_tokens=begins).ids
        )


def test_what_a_class_says_beside_the_split_stays(tmp_path, tokenizers):
    # Gemma pads on the left; Llama names the special tokens, where the vocabulary has them.
    folder = write(tmp_path / "gemma", tokenizers["llama3"], tokenizer_class="GemmaTokenizer", chat_template="{{ 1 }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template == "{{ 1 }}"
    folder = write(tmp_path / "llama", tokenizers["metaspace"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer.decode(tokenizer.encode("it</s>"), skip_special_tokens=True) == "it"


def test_a_token_of_the_settings_alone_is_known(tmp_path, tokenizers):
    added = {"500": {"content": "<|im_end|>", "special": True, "normalized": False}}
    folder = write(tmp_path / "model", tokenizers["llama3"], tokenizer_class="Qwen2Tokenizer")
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    assert load_tokenizer(folder).encode("<|im_end|>") == [500]


@pytest.fixture
def llama(tmp_path):
    """A Llama whose tokenizer splits as Llama 3 does, under the name of a class that does not."""
    folder = write_checkpoint(tmp_path / "model", "llama")
    tiny_lm.tokenizer().save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = KINDS["llama3"][0]
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return folder


def test_a_model_whose_dtype_transformers_cannot_read_has_a_tokenizer_all_the_same(llama):
    edit_json(llama / "config.json", dtype="torch.float32")
    assert load_tokenizer(llama).encode("It", add_special_tokens=False)


def test_a_path_to_no_checkpoint_is_refused_as_load_does(tmp_path):
    for read in (diffquant.load, diffquant.load_tokenizer):
        with pytest.raises(
            CheckpointError, match=r"nowhere is neither a checkpoint folder nor a \.gguf file; give the"
        ):
            read(tmp_path / "nowhere")
