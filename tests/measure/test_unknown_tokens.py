"""A tokenizer that makes tokens which the model's embedding does not have is named by everything that reads text."""

import pytest
import torch

from diffquant.calib.calibration.calibrate import calibrate
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.measure.fidelity.sides import Model
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.tasks import perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from examples.shots.nll import score_positions
from tests.support import tiny_lm
from tests.support.tables import in_one_test

WORD = "zyzzyva"
TEXT = f"It was the {WORD} of the house. " * 40
SAID = rf"token {tiny_lm.WORDS} \('{WORD}'\), but the model's embedding has {tiny_lm.WORDS} rows"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose tokenizer has one token more than its embedding has rows."""
    folder = tiny_lm.write_llama(tmp_path_factory.mktemp("models") / "llama")
    tokenizer = open_source(folder).tokenizer
    tokenizer.add_tokens([WORD])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    source = open_source(folder)
    return TorchModel(load(source, dtype=torch.float32), source.tokenizer)


READERS = {
    "perplexity": lambda model: perplexity.score_text(model, TEXT, 64, 32),
    "its reference": lambda model: perplexity.compute_reference(model, TEXT, 64, 32),
    "nll by position": lambda model: score_positions(model, TEXT, 64),
    "a request": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary).request("It was", f" the {WORD}"),
    "one without a context": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary).request("", WORD),
    "a prompt": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary).encode(TEXT),
    "fidelity": lambda model: Model("model", model, {}).tokens(TEXT),
    "another's tokens": lambda model: Model("model", model, {}).predict(0, torch.tensor([1, tiny_lm.WORDS, 2]), 0),
}


@in_one_test("reader", READERS)
def test_a_token_without_an_embedding_is_named(model, reader):
    with pytest.raises(UsageError, match=SAID):
        READERS[reader](model)


def test_calibration_names_it_before_a_pass(folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UsageError, match=SAID):
        calibrate(folder, ["k"], text=tmp_path / "text.txt", window=64)
