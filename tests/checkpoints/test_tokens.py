"""The first tokens of a long text, which is not encoded whole for them."""

import logging

import pytest
import torch

from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import encode_text
from diffquant.data import books_text, pocket_models
from tests.support import tiny_lm

CPU = torch.device("cpu")
KNOWN = 100_000


@pytest.fixture(scope="module", params=["words", *pocket_models("prose")[:1]], ids=["words", "bytes"])
def tokenizer(request):
    return tiny_lm.tokenizer() if request.param == "words" else open_source(request.param).tokenizer


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode(self, text, **options):
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("tokens", [1, 2, 300, 5000])
def test_first_tokens_are_those_of_the_whole_text(tokenizer, tokens):
    text, counting = books_text(), Counting(tokenizer)
    assert torch.equal(
        encode_text(counting, text, KNOWN, CPU, tokens), encode_text(tokenizer, text, KNOWN, CPU)[:tokens]
    )
    assert counting.characters < len(text)


def test_a_text_whose_tokens_are_long_or_that_has_fewer_is_read_to_its_end(tokenizer):
    # Spaces are no tokens of one tokenizer, and long ones of the other.
    text = " " * 50_000 + books_text()[:1000]
    whole = encode_text(tokenizer, text, KNOWN, CPU)
    for tokens in (100, 10 * len(whole)):
        assert torch.equal(encode_text(tokenizer, text, KNOWN, CPU, tokens), whole[:tokens])


def test_a_text_longer_than_the_context_is_read_without_a_warning():
    heard = []
    handler = logging.Handler()
    handler.emit = heard.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        tokenizer = open_source(pocket_models("needle")[0]).tokenizer
        ids = tokenizer(books_text()[:20000])["input_ids"]
    finally:
        logger.removeHandler(handler)
    assert len(ids) > tokenizer.model_max_length
    assert heard == []
