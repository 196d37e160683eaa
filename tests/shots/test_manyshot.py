"""Many-shot classification: what is shown, what is asked, and that decoding among labels is exact."""

import json
from collections import Counter
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from diffquant import data
from diffquant.errors import UsageError
from diffquant.measure.language_model import RequestEncoder
from diffquant.measure.protocols import needle
from diffquant.measure.torch_model import TorchModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from examples.shots import protocol
from examples.shots.labelled import Dataset, Example
from examples.shots.protocol import ManyShotPlan, demonstrations, evaluate_many_shot, prompt
from tests.support import tiny_lm
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

# One label begins another; some have several tokens in common.
LABELS = ("time", "time zone", "timer", "card arrival", "card not working", "weather")


@cache
def examples(count=60):
    texts = [s for s in needle.split_sentences(data.books_text()) if 12 < len(s) < 40][: count + 20]
    made = [Example(text, LABELS[i % len(LABELS)]) for i, text in enumerate(texts)]
    return Dataset(tuple(made[:count]), tuple(made[count:]))


@cache
def llama_tokenizer():
    """As Llama 2 has it: a space before the text, words not split beforehand, other characters as bytes."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=650, special_tokens=special, show_progress=False)
    learned.train_from_iterator([data.books_text()[:30000].replace("\n", " ")], trainer)
    kept = json.loads(learned.to_str())["model"]
    bpe = Tokenizer(
        models.BPE(
            kept["vocab"], [tuple(m) for m in kept["merges"]], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {"plain": tiny_lm.tokenizer, "bos": lambda: tiny_lm.tokenizer(adds_bos=True), "llama": llama_tokenizer}


def whole_text(shown, text):
    return f"{shown}\n\nQuestion: {text}\nType:"


def label_paths(tokenizer, before, labels=LABELS):
    """Tokens of each label and the one after it, read off the whole prompt's tokens."""
    stem = tokenizer.encode(before)
    paths = []
    for label in labels:
        end = len(tokenizer.encode(f"{before} {label}")) + 1
        paths.append(tokenizer.encode(f"{before} {label}\n\nQuestion:")[len(stem) : end])
    return paths


@in_one_test("draw", [0, 1])
def test_demonstrations_are_each_example_once_and_balanced_in_every_first_part(draw):
    train = examples().train[:50]
    drawn = demonstrations(train, 0, draw)
    assert Counter(drawn) == Counter(train)
    total = Counter(example.label for example in train)
    for shots in range(1, len(train)):
        shown = Counter(example.label for example in drawn[:shots])
        most = max(shown.values())
        assert all(shown[label] >= min(most - 1, total[label]) for label in total)


def test_a_prompt_reads_as_documented_and_more_shots_add_to_fewer():
    train = (Example("How far?", "distance"), Example("Who {was} it?", "person"))
    drawn = demonstrations(train, 0, 0)
    parts = prompt(drawn, 2, 0).split("\n\n")
    assert sorted(parts) == ["Question: How far?\nType: distance", "Question: Who {was} it?\nType: person"]
    many = demonstrations(examples().train, 0, 0)
    few, more = (set(prompt(many, shots, 0).split("\n\n")) for shots in (6, 24))
    assert few < more


@in_one_test("name", TOKENIZERS)
def test_tokens_are_those_of_the_whole_prompt(name):
    tokenizer = TOKENIZERS[name]()
    encoder = RequestEncoder(tokenizer, 4096, len(tokenizer))
    dataset = examples()
    texts = [example.text for example in dataset.test]
    shown = prompt(demonstrations(dataset.train, 0, 0), 9, 0)
    queries = protocol.query_tokens(encoder, texts, dataset.train[0])
    labels = protocol.label_tokens(encoder, LABELS)
    for text, query in zip(texts, queries, strict=True):
        assert [*encoder.encode(shown), *query] == tokenizer.encode(whole_text(shown, text))
    assert [list(tokens) for tokens in labels] == label_paths(tokenizer, whole_text(shown, texts[0]))


@pytest.mark.parametrize("adds_bos", [False, True], ids=["plain", "bos"])
def test_choices_are_those_of_transformers_constrained_generation(adds_bos):
    model, tokenizer = tiny_lm.llama(1024), tiny_lm.tokenizer(adds_bos)
    dataset = examples()
    outcome = evaluate_many_shot(TorchModel(model, tokenizer), dataset, ManyShotPlan(shots=12), batch_tokens=1024)
    shown = prompt(demonstrations(dataset.train, 0, 0), 12, 0)
    chosen = []
    for text, _ in protocol.question_order(dataset.test, 0):
        before = whole_text(shown, text)
        paths = label_paths(tokenizer, before)
        ids = tokenizer(before, return_tensors="pt").input_ids
        start = ids.shape[1]

        def allowed(_, said, start=start, paths=paths):
            so_far = said[start:].tolist()
            going_on = {p[len(so_far)] for p in paths if p[: len(so_far)] == so_far and len(p) > len(so_far)}
            return sorted(going_on) or [1]

        said = model.generate(
            ids, prefix_allowed_tokens_fn=allowed, do_sample=False, max_new_tokens=max(map(len, paths)), pad_token_id=1
        )[0, start:].tolist()
        (found,) = [i for i, path in enumerate(paths) if said[: len(path)] == path]
        chosen.append(outcome.labels.index(LABELS[found]))
    assert outcome.choices == [chosen]
    assert len(set(chosen)) > 2


RECIPES = {
    "16 bits": Recipe(),
    "row shift": Recipe.of(logits="4:row:shift"),
    "kv row": Recipe.of(kv="4:row", logits="4:row"),
    "tensor": Recipe.of(logits="4:tensor"),
    "pair": Recipe.of(logits="4:pair"),
    "k column": Recipe.of(k="4:c16", v="4:row"),
    "residual": Recipe.of(kv="4:row", residual=9),
}


@pytest.fixture(scope="module")
def diff_v2(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "diff-v2")


@pytest.mark.parametrize("recipe", sampled(RECIPES.values(), 3), ids=RECIPES)
def test_choices_are_those_of_full_passes_over_each_sequence_alone(diff_v2, recipe):
    model, tokenizer = load(diff_v2, recipe, dtype=torch.float64), tiny_lm.tokenizer()
    dataset = examples()
    shown = prompt(demonstrations(dataset.train, 0, 0), 6, 0)
    asked = protocol.question_order(dataset.test, 0)[:6]
    chosen = []
    for text, _ in asked:
        before = whole_text(shown, text)
        ids = tokenizer.encode(before)
        left = dict(zip(LABELS, label_paths(tokenizer, before), strict=True))
        depth = 0
        while len(left) > 1:
            logits = model(torch.tensor([ids])).logits[0, -1]
            token = max({path[depth] for path in left.values()}, key=lambda token, logits=logits: float(logits[token]))
            left = {label: path for label, path in left.items() if path[depth] == token}
            ids, depth = [*ids, token], depth + 1
        chosen.append(sorted(LABELS).index(*left))
    for batch_tokens in (60, 4096):
        outcome = evaluate_many_shot(
            TorchModel(model, tokenizer), dataset, ManyShotPlan(shots=6), limit=6, batch_tokens=batch_tokens
        )
        assert outcome.choices == [chosen]
    assert len(set(chosen)) > 1


def test_all_is_as_many_as_fit_and_no_more():
    model, tokenizer = tiny_lm.llama(400), tiny_lm.tokenizer()
    dataset = examples()
    outcome = evaluate_many_shot(TorchModel(model, tokenizer), dataset, ManyShotPlan(shots=None, draws=2))
    longest_label = max(len(path) for path in label_paths(tokenizer, "Type:"))

    def tokens(shots):
        prompts = [prompt(demonstrations(dataset.train, 0, draw), shots, 0) for draw in range(2)]
        return (
            max(len(tokenizer.encode(whole_text(p, text))) for p in prompts for text, _ in dataset.test) + longest_label
        )

    assert tokens(outcome.shots) == outcome.tokens <= 400 < tokens(outcome.shots + 1)


def test_what_does_not_fit_or_cannot_be_told_apart_is_refused():
    tokenizer, dataset = tiny_lm.tokenizer(), examples()
    with pytest.raises(UsageError, match=r"40 demonstrations .* take \d+ tokens, and the model sees 300"):
        evaluate_many_shot(TorchModel(tiny_lm.llama(300), tokenizer), dataset, ManyShotPlan(shots=40))
    with pytest.raises(UsageError, match="which one demonstration does not fit"):
        evaluate_many_shot(TorchModel(tiny_lm.llama(40), tokenizer), dataset, ManyShotPlan(shots=None))
    with pytest.raises(UsageError, match=r"61 demonstrations are asked for and train has 60"):
        ManyShotPlan(shots=61).check(dataset)

    class Words:
        bos_token_id, eos_token_id = 0, 1
        known = ("Question:", "Type:", "?", "entity")

        def encode(self, text, add_special_tokens=True):
            return [2 + self.known.index(word) if word in self.known else 99 for word in text.split()]

        def decode(self, token):
            return "<s>"

    with pytest.raises(UsageError, match="labels 'human' and 'location' are the same to the tokenizer"):
        protocol.label_tokens(RequestEncoder(Words(), 100, 100), ("entity", "human", "location"))
