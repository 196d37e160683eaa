import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from diffquant import data
from diffquant.checkpoints.texts import load_text
from diffquant.errors import NonFiniteError, UsageError
from diffquant.measure import scoring
from diffquant.measure.tasks.perplexity import compute_perplexity, compute_reference
from diffquant.measure.torch_model import TorchModel
from tests.support import tiny_lm
from tests.support.tables import in_one_test

TEXT = data.books_text()[5000:6500]


def full_logits(model, tokens):
    """Next-token logits [N, V] after the prefix token, in one pass."""
    return model(torch.tensor([[0, *tokens[:-1]]])).logits[0]


def test_a_text_within_one_window_has_its_plain_perplexity():
    model, tokenizer = tiny_lm.llama(2048), tiny_lm.tokenizer()
    tokens = tokenizer.encode(TEXT)
    nll = cross_entropy(full_logits(model, tokens), torch.tensor(tokens), reduction="sum").item()
    score = compute_perplexity(TorchModel(model, tokenizer), TEXT, window=2048, stride=2048)
    assert score["tokens"] == len(tokens)
    assert score["perplexity"] == pytest.approx(math.exp(nll / len(tokens)), rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(TEXT.encode()), rel=1e-5)


@pytest.mark.parametrize(
    ("window", "stride"), [(64, 64), (64, 17), (50, 1)], ids=["disjoint", "overlapping", "sliding"]
)
@pytest.mark.parametrize("batch_tokens", [1, 1000], ids=["one", "many"])
def test_strided_windows_predict_every_token_once_with_their_context(window, stride, batch_tokens):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    tokens = [0, *tokenizer.encode(TEXT[:400])]
    nll, predicted = 0.0, 0
    while predicted < len(tokens) - 1:
        end = min(predicted + (stride if predicted else window), len(tokens) - 1)
        logits = model(torch.tensor([tokens[end - window : end]])).logits[0, predicted - end :]
        nll += cross_entropy(logits, torch.tensor(tokens[predicted + 1 : end + 1]), reduction="sum").item()
        predicted = end
    score = compute_perplexity(TorchModel(model, tokenizer), TEXT[:400], window, stride, batch_tokens)
    assert score["perplexity"] == pytest.approx(math.exp(nll / score["tokens"]), rel=1e-5)


def test_windows_beyond_the_context_are_cut_to_it_and_that_is_said(caplog):
    model = TorchModel(tiny_lm.llama(40), tiny_lm.tokenizer())
    wanted = compute_perplexity(model, TEXT[:400], 40, 10)
    assert not caplog.messages
    assert compute_perplexity(model, TEXT[:400], 55, 10) == wanted
    assert caplog.messages == ["perplexity reads windows of 40 tokens, the model's context, not 55"]


def test_windows_tell_apart_what_the_mean_sums_over(monkeypatch):
    monkeypatch.setattr(scoring, "_KL_ENTRIES", 7 * tiny_lm.WORDS)
    model, other, tokenizer = tiny_lm.llama(), tiny_lm.llama(seed=1), tiny_lm.tokenizer()
    tokens = [0, *tokenizer.encode(TEXT[:400])]
    reference = compute_reference(TorchModel(model, tokenizer), TEXT[:400], 64, 64)
    score = compute_perplexity(TorchModel(other, tokenizer), TEXT[:400], 64, 64, reference=reference)
    p, q = (m(torch.tensor([tokens[64:128]])).logits[0].log_softmax(-1) for m in (model, other))
    expected = kl_div(q, p, reduction="batchmean", log_target=True).item()
    assert score["tokens_by_window"][:2] == [64, 64]
    assert sum(score["tokens_by_window"]) == score["tokens"]
    assert score["kl"] == pytest.approx(np.average(score["kl_by_window"], weights=score["tokens_by_window"]))
    assert score["kl_by_window"][1] == pytest.approx(expected, rel=1e-4)
    assert score["nll_by_window"][1] == pytest.approx(-q[range(64), tokens[65:129]].mean().item(), rel=1e-4)


@in_one_test(("text", "window", "stride"), [("", 8, 8), ("a", 8, 8), (TEXT, 8, 9), (TEXT, 8, 0)])
def test_text_or_windows_that_cannot_be_are_refused(text, window, stride):
    with pytest.raises(UsageError, match="tokens"):
        compute_perplexity(TorchModel(tiny_lm.llama(), tiny_lm.tokenizer()), text, window, stride)


def test_a_model_that_computes_nan_is_refused():
    model = tiny_lm.llama()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError):
        compute_perplexity(TorchModel(model, tiny_lm.tokenizer()), TEXT)


def test_a_perplexity_beyond_all_numbers_is_said():
    model = tiny_lm.llama()
    model.lm_head.weight.data *= 1e6
    with pytest.raises(NonFiniteError, match=r"a loss of [\d,]{5,} nats per token has no finite perplexity"):
        compute_perplexity(TorchModel(model, tiny_lm.tokenizer()), TEXT)


def test_the_text_that_ships_is_prose_and_a_file_is_read_as_it_is(tmp_path):
    assert 200_000 < len(load_text()) < 300_000
    assert load_text(characters=100) == load_text()[:100]
    path = tmp_path / "text.txt"
    path.write_text("naïve ☃")
    assert load_text(path) == "naïve ☃"
    path.write_bytes("\ufeffnaïve ☃".encode())
    assert load_text(path) == "naïve ☃"
    for content in (b"", b" \n", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"text\.txt"):
            load_text(path)
    with pytest.raises(UsageError, match=r"absent\.txt"):
        load_text(tmp_path / "absent.txt")
