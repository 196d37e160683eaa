"""What scoring gives: log-probabilities of continuations, whatever the batch, and tokens that no embedding has."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from diffquant.calib.calibration.calibrate import calibrate
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import max_length
from diffquant.errors import DiffQuantError, NonFiniteError, UsageError
from diffquant.measure import can_pad_left, can_share_prefixes, scoring
from diffquant.measure.fidelity.models import LocalModel
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.protocols import hellaswag
from diffquant.measure.scoring import score, split_into_passes
from diffquant.measure.tasks import perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from examples.shots.nll import score_positions
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

AWKWARD = [
    ("", "alone"),
    ("A context that ends in spaces   ", "and goes on"),
    ("One", " x"),
    ("One", " two three four"),
    ("One", "-"),
    ("<s>Begins with the prefix token", " itself"),
    ("café", " naïve ☃"),
    ("A long context. " * 12, " a long continuation" * 5),
    ("A long context. " * 12, " short"),
]


@pytest.fixture(scope="module")
def diff_v2(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "diff-v2")


def hflm_answers(model, tokenizer, pairs, **options):
    oracle = HFLM(pretrained=model, tokenizer=tokenizer, **options)
    instances = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return oracle.loglikelihood(instances, disable_tqdm=True)


def our_answers(model, tokenizer, pairs, **options):
    encoder = RequestEncoder(tokenizer, max_length(model.config, tokenizer), model.config.vocab_size)
    return score(TorchModel(model), encoder.encode_requests(pairs), **options)


def assert_alike(ours, theirs):
    torch.testing.assert_close(
        torch.tensor([logprob for logprob, _ in ours]), torch.tensor([p for p, _ in theirs]), rtol=1e-5, atol=1e-3
    )
    assert [is_greedy for _, is_greedy in ours] == [g for _, g in theirs]


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "bos"])
def test_real_items_score_as_hflm_scores_them(adds_bos):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer(adds_bos)
    items = hellaswag.load_items(limit=20)
    pairs = [(item.query, f" {ending}") for item in items for ending in item.endings]
    theirs = hflm_answers(model, tokenizer, pairs, batch_size=4)
    outcome = hellaswag.evaluate_hellaswag(TorchModel(model, tokenizer), items)
    assert_alike(our_answers(model, tokenizer, pairs), theirs)
    choices = torch.tensor([p for p, _ in theirs]).view(-1, 4).argmax(1)
    assert outcome.details["choices_by_sum"] == choices.tolist()
    assert len(set(choices.tolist())) > 1


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "bos"])
@pytest.mark.parametrize("length", [512, 24], ids=["fits", "truncated"])
def test_awkward_pairs_score_as_hflm_scores_them(adds_bos, length):
    model, tokenizer = tiny_lm.llama(length), tiny_lm.tokenizer(adds_bos)
    pairs = [pair for pair in AWKWARD if len(tokenizer.encode(pair[1])) <= length]
    assert_alike(our_answers(model, tokenizer, pairs), hflm_answers(model, tokenizer, pairs))


@in_one_test("adds_bos", [False, True])
def test_a_blank_context_is_none_and_its_spaces_are_scored(adds_bos):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer(adds_bos)
    blank, empty, _ = our_answers(model, tokenizer, [("  ", " alone"), ("", "   alone"), AWKWARD[1]])
    assert blank == pytest.approx(empty)


def test_what_greedy_decoding_says_is_greedy():
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    context = tokenizer("He took", return_tensors="pt").input_ids
    said = model.generate(context, max_new_tokens=5, do_sample=False, eos_token_id=None)[0, context.shape[1] :]
    request = scoring.Request(tuple(context[0].tolist()), tuple(said.tolist()))
    wrong = scoring.Request(request.context, (*request.continuation[:-1], (request.continuation[-1] + 1) % 400))
    assert [is_greedy for _, is_greedy in score(TorchModel(model), [request, wrong])] == [True, False]


RECIPES = {
    "16 bits": Recipe(),
    "row": Recipe.of(logits="4:row"),
    "row shift": Recipe.of(logits="4:row:shift"),
    "kv row": Recipe.of(kv="4:row"),
    "kv group": Recipe.of(kv="4:g4", logits="6:row"),
    "tensor": Recipe.of(logits="4:tensor"),
    "pair": Recipe.of(logits="4:pair"),
    "head shift": Recipe.of(logits="4:head:shift"),
    "map": Recipe.of(logits="4:map", kv="4:row"),
    "alike": Recipe.of(logits="4:tensor:alike"),
    "qk tensor": Recipe.of(qk="4:tensor"),
    "qk smooth": Recipe.of(qk="4:head:smooth"),
    "qk block": Recipe.of(qk="4:b16"),
    "block": Recipe.of(logits="4:b16"),
    "logits group": Recipe.of(logits="4:g16"),
    "logits nvfp4": Recipe.of(logits="nvfp4"),
    "p row": Recipe.of(p="8:row"),
    "p group": Recipe.of(p="4:g16"),
    "p mxfp8 of a layer": Recipe.of(overrides={"*.layers.1.*.p": "mxfp8"}),
    "pv row": Recipe.of(pv="6:row"),
    "pv group": Recipe.of(pv="4:g16"),
    "pv channel": Recipe.of(pv="e4m3:channel"),
    "k column": Recipe.of(k="4:c16", v="4:row"),
    "residual": Recipe.of(kv="4:row", residual=9),
}


def scores_alone(model, requests):
    """Log-probability of each continuation from a pass of its own."""
    for request in requests:
        tokens = torch.tensor([request.context + request.continuation])
        logprobs = model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])
        yield float(logprobs[0, len(request.context) - 1 :].sum())


@pytest.mark.parametrize("recipe", sampled(RECIPES.values(), 3), ids=RECIPES.keys())
def test_a_quantized_score_is_that_of_its_sequence_run_alone(diff_v2, recipe):
    model = load(diff_v2, recipe, dtype=torch.float64)
    items = hellaswag.load_items(limit=4)
    encoder = RequestEncoder(tiny_lm.tokenizer(), 512, tiny_lm.WORDS)
    requests = encoder.encode_requests((item.query, f" {ending}") for item in items for ending in item.endings)
    alone = list(scores_alone(model, requests))
    for batch_tokens in (60, 4096):
        ours = [logprob for logprob, _ in score(TorchModel(model), requests, batch_tokens)]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=0, atol=1e-3)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [8.0] * 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "recipe", [{}, {"kv": "4:row", "logits": "4:row"}, {"logits": "nvfp4"}, {"p": "4:g4"}], ids=str
)
@pytest.mark.parametrize("source", ["phi4flash", "motif3", "llama"])
def test_a_score_of_a_model_with_windows_or_longrope_is_that_of_its_sequence_run_alone(tmp_path, source, recipe):
    changes = {"head_dim": 16, "rope_parameters": LONGROPE} if source == "llama" else {}
    model = load(write_checkpoint(tmp_path / source, source, **changes), Recipe.of(**recipe), dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    draw = lambda length: tuple(torch.randint(2, 90, (length,), generator=rng).tolist())  # noqa: E731
    contexts = [draw(length) for length in (3, 9, 14, 25, 31)]
    requests = [scoring.Request(context, draw(length)) for context in contexts for length in (1, 4, 7)]
    alone = list(scores_alone(model, requests))
    ours = [logprob for logprob, _ in score(TorchModel(model), requests)]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(alone), rtol=0, atol=1e-4)


def test_prefixes_are_shared_and_sequences_padded_only_where_no_scale_spans_them():
    shared = {name for name, recipe in RECIPES.items() if can_share_prefixes(recipe)}
    of_groups = {"logits group", "logits nvfp4", "p group", "p mxfp8 of a layer"}
    assert shared == {"16 bits", "row", "row shift", "kv row", "kv group", "p row", "pv row", *of_groups}
    padded = {name for name, recipe in RECIPES.items() if can_pad_left(recipe)}
    counted = {"logits group", "logits nvfp4", "p group", "p mxfp8 of a layer", "pv group"}
    assert set(RECIPES) - padded == {"block", "qk block", "k column", *counted}


@in_one_test(("granularity", "passes"), [("tensor", 1), ("b16", 5)])
def test_whole_sequences_of_alike_lengths_run_together(diff_v2, granularity, passes):
    model, lengths = load(diff_v2, Recipe.of(logits=f"4:{granularity}")), [9, 10, 11, 12, 13, 10]
    requests = [scoring.Request((1,) * (length - 2), (2, 3)) for length in lengths]
    read = []
    model.model.register_forward_pre_hook(lambda *call: read.append(call[2]["input_ids"].shape), with_kwargs=True)
    score(TorchModel(model), requests)
    assert len(read) == passes
    assert sum(rows for rows, _ in read) == len(requests)


def test_contexts_run_once_and_only_scored_positions_reach_the_vocabulary(monkeypatch):
    model, tokenizer = tiny_lm.llama(), tiny_lm.tokenizer()
    items = hellaswag.load_items(limit=3)
    encoder = RequestEncoder(tokenizer, 512, len(tokenizer))
    requests = encoder.encode_requests((item.query, f" {ending}") for item in items for ending in item.endings)
    read, projected = [], []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["attention_mask"][:, -kwargs["input_ids"].shape[1] :].sum()),
        with_kwargs=True,
    )
    model.lm_head.register_forward_hook(lambda _, args, out: projected.append(len(args[0])))
    score(TorchModel(model), requests)
    contexts = {request.context for request in requests}
    further = sum(len(request.continuation) - 1 for request in requests)
    assert sum(read) == sum(map(len, contexts)) + further
    assert sum(projected) == len(contexts) + further


def test_a_model_that_computes_nan_is_refused():
    model = tiny_lm.llama()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="float32"):
        our_answers(model, tiny_lm.tokenizer(), AWKWARD[:2])


def test_a_continuation_without_tokens_or_with_too_many_is_refused():
    encoder = RequestEncoder(tiny_lm.tokenizer(), 8, tiny_lm.WORDS)
    with pytest.raises(DiffQuantError, match="no tokens"):
        encoder.encode_request("context", "")
    with pytest.raises(DiffQuantError, match="more than the model's context of 8"):
        encoder.encode_request("context", " many words that do not fit" * 3)


LENGTHS = st.lists(st.integers(1, 60), max_size=9).map(lambda lengths: sorted(lengths, reverse=True))


def cost(runs, lengths, pass_cost):
    return sum(len(run) * lengths[run.start] + pass_cost for run in runs)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 40), st.integers(0, 50))
def test_no_other_cut_within_the_budget_costs_less(lengths, budget, cached, pass_cost):
    def fits(run):
        return len(run) == 1 or len(run) * (lengths[run.start] + cached) <= budget

    runs = split_into_passes(lengths, budget, cached, pass_cost)
    assert [index for run in runs for index in run] == list(range(len(lengths)))
    assert all(map(fits, runs))
    others = (
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, len(lengths)), strict=True)]
        for count in range(len(lengths))
        for cuts in combinations(range(1, len(lengths)), count)
    )
    allowed = [cut for cut in others if all(map(fits, cut))]
    assert cost(runs, lengths, pass_cost) == min((cost(c, lengths, pass_cost) for c in allowed), default=0)


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
    "perplexity": lambda model: perplexity.compute_perplexity(model, TEXT, 64, 32),
    "its reference": lambda model: perplexity.compute_reference(model, TEXT, 64, 32),
    "nll by position": lambda model: score_positions(model, TEXT, 64),
    "a request": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary_size).encode_request(
        "It was", f" the {WORD}"
    ),
    "one without a context": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary_size).encode_request(
        "", WORD
    ),
    "a prompt": lambda model: RequestEncoder(model.tokenizer, 512, model.vocabulary_size).encode(TEXT),
    "fidelity": lambda model: LocalModel("model", model, {}).tokens(TEXT),
    "another's tokens": lambda model: LocalModel("model", model, {}).predict(0, torch.tensor([1, tiny_lm.WORDS, 2])),
}


@in_one_test("reader", READERS)
def test_a_token_without_an_embedding_is_named(model, reader):
    with pytest.raises(UsageError, match=SAID):
        READERS[reader](model)


def test_calibration_names_it_before_a_pass(folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UsageError, match=SAID):
        calibrate(folder, ["k"], text=tmp_path / "text.txt", window=64)
