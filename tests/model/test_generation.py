"""Streaming: what comes, and that nothing goes on once nobody reads."""

import threading
from copy import copy
from functools import partial
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from diffquant import load, load_tokenizer
from diffquant.checkpoints.texts import iterate_text_pieces
from diffquant.data import books_text
from diffquant.errors import UsageError
from diffquant.verbs.generation import stream
from tests.support import tiny_lm
from tests.support.tables import in_one_test


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_lm.write_diff_v2(tmp_path_factory.mktemp("stream") / "v2")
    return load(folder), load_tokenizer(folder)


def test_pieces_add_up_to_what_generate_continues_with(model):
    language_model, tokenizer = model
    prompt = tokenizer("It was a dark night", return_tensors="pt")
    ids = language_model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    continuation = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "".join(stream(*model, "It was a dark night", max_new_tokens=12)) == continuation


def test_a_token_that_the_model_does_not_know_is_refused_by_number(model):
    language_model, tokenizer = model
    grown = copy(tokenizer)
    grown._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    grown.add_tokens(["stormy"])
    assert "".join(stream(language_model, grown, "dark", max_new_tokens=2))
    with pytest.raises(UsageError, match=rf"token {tiny_lm.WORDS} \(.*embedding has {tiny_lm.WORDS} rows"):
        next(stream(language_model, grown, "dark and stormy", max_new_tokens=2))


def test_lines_keep_their_indent_where_a_tokenizer_marks_words_by_a_space_before_them(model, monkeypatch):
    code = "def f(x):\n    return x\n\n        y ☃ z"
    marked = Tokenizer(models.BPE())
    marked.pre_tokenizer, marked.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    marked.train_from_iterator([code], trainers.BpeTrainer(special_tokens=["<s>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=marked)
    ids = tokenizer(code, return_tensors="pt").input_ids[0]

    def generate(input_ids, streamer, **_):
        for made in (input_ids, *ids.split(1)):
            streamer.put(made)
        streamer.end()

    monkeypatch.setattr(model[0], "generate", generate)
    assert "".join(stream(model[0], tokenizer, "def", max_new_tokens=99)) == tokenizer.decode(ids) == code


def test_pieces_are_the_text_of_all_tokens_with_bytes_and_special_ones_among_them():
    llama = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    llama.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    llama.decoder = decoders.Sequence(list(parts))
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    text = books_text()[:5000]
    llama.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama, unk_token="<unk>")
    random = Random(0)
    for start in random.sample(range(4900), 100):
        ids = tokenizer(text[start : start + 30] + "☃ 漢字\n  x" + text[start + 30 : start + 60]).input_ids
        ids.insert(random.randrange(5), tokenizer.unk_token_id)
        for skips in (True, False):
            decode = partial(tokenizer.decode, skip_special_tokens=skips)
            assert "".join(iterate_text_pieces(ids, decode)) == decode(ids)


def test_generation_ends_when_its_reader_leaves(model):
    before = threading.active_count()
    pieces = stream(*model, "It was a dark night", max_new_tokens=400)
    next(pieces)
    pieces.close()
    assert threading.active_count() == before


def test_a_temperature_near_zero_chooses_the_likeliest_and_a_whole_number_is_one(model):
    language_model, tokenizer = model
    greedy = list(stream(language_model, tokenizer, "It was a dark night", max_new_tokens=8))
    assert list(stream(language_model, tokenizer, "It was a dark night", 8, temperature=1e-40)) == greedy
    # transformers takes floats alone.
    list(stream(language_model, tokenizer, "It was a dark night", 8, temperature=2))


def test_samples_come_of_the_whole_vocabulary(model, monkeypatch):
    language_model, tokenizer = model
    generate, made = language_model.generate, []
    monkeypatch.setattr(language_model, "generate", lambda **given: made.append(generate(**given)))
    torch.manual_seed(0)
    # So hot that all tokens are alike.
    list(stream(language_model, tokenizer, "It was a dark night", max_new_tokens=40, temperature=1e4))
    (ids,) = made
    logits = language_model(ids).logits[0, :-1]
    ranks = (logits > logits.gather(1, ids[0, 1:, None])).sum(1)[-40:]
    # All but one set of 40 draws in a hundred thousand reach beyond three quarters.
    assert ranks.max() >= 0.75 * logits.shape[1]


def test_an_empty_prompt_and_a_missing_chat_template_are_refused(model):
    with pytest.raises(UsageError, match="the prompt is empty"):
        next(stream(*model, "  ", max_new_tokens=4))
    with pytest.raises(UsageError, match="not UTF-8 text from character 3"):
        next(stream(*model, "caf\udce9", max_new_tokens=4))
    with pytest.raises(UsageError, match="no chat template"):
        next(stream(*model, "hello", max_new_tokens=4, chat=True))


def test_a_prompt_of_which_the_tokenizer_makes_no_token_is_refused(model):
    letters = Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        next(stream(model[0], PreTrainedTokenizerFast(tokenizer_object=letters), "☃", max_new_tokens=4))


@in_one_test(
    "template",
    [
        "{{ messages[",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no system prompt') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_chat_template_that_fails_is_one_clear_error(model, template):
    loaded, tokenizer = model
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=r"chat template fails: ."):
        next(stream(loaded, tokenizer, "hello", max_new_tokens=4, chat=True))
