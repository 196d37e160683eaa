"""What evaluation on a CUDA device saves: forward passes, planning and encoding."""

import copy
import re
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from diffquant.measure import scoring
from diffquant.measure.language_model import LanguageModel, ModelOutputs, Request
from diffquant.measure.protocols import hellaswag
from diffquant.measure.scoring import pass_cost_on, score, split_into_passes
from diffquant.measure.task import batch_tokens_on
from diffquant.measure.torch_model import TorchModel
from diffquant.recipe import Recipe
from tests.support import tiny_lm


class Cache:
    def batch_select_indices(self, indices):
        pass

    def branch(self):
        return self


class Counting(LanguageModel):
    """A model of two tokens that knows nothing, and counts its passes."""

    device = torch.device("cpu")
    recipe = Recipe()
    max_length = 8192
    vocabulary_size = 2

    def __init__(self):
        self.passes = 0

    def new_cache(self):
        return Cache()

    def compute_outputs(self, ids, mask=None, cache=None):
        self.passes += 1
        return ModelOutputs(torch.zeros(*ids.shape, 2))

    def generate(self, *_):
        raise NotImplementedError


def requests(items):
    """Requests as long as the items that ship, a token a word or a sign."""

    def tokens(text):
        return tuple(len(word) % 2 for word in re.findall(r"\w+|[^\w\s]", text))

    # What stands first tells the contexts apart.
    return [
        Request((*divmod(number, 1000), *tokens(item.query)), tokens(ending))
        for number, item in enumerate(items)
        for ending in item.endings
    ]


def test_a_cuda_device_takes_few_passes_for_the_same_scores(monkeypatch):
    asked = requests(hellaswag.load_items(limit=400))
    passes, scores = {}, {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(scoring, "pass_cost_on", lambda _, device=device: pass_cost_on(device))
        model = Counting()
        scores[device] = score(model, asked, batch_tokens_on(device))
        passes[device] = model.passes
    assert scores["cpu"] == scores["cuda"]
    assert passes["cuda"] < 0.2 * passes["cpu"]


class Counted(Sequence):
    def __init__(self, values):
        self.values = values
        self.looks = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.looks += 1
        return self.values[index]


def test_planning_looks_at_lengths_and_not_at_pairs_of_sequences():
    lengths = Counted(sorted((20 + i % 60 for i in range(6000)), reverse=True))
    runs = split_into_passes(lengths, 1 << 20, 80, 4096)
    assert sum(map(len, runs)) == 6000
    assert lengths.looks < 6000 * (60 + 3)


def test_a_models_cells_share_one_encoding_of_the_items(monkeypatch):
    # One that no other test has encoded with.
    tokenizer, items = copy.deepcopy(tiny_lm.tokenizer()), hellaswag.load_items(limit=3)
    encoded = []
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, *a, **k: encoded.append(a) or encode(self, *a, **k))
    model = tiny_lm.llama()

    def evaluate(tokenizer, items):
        before = len(encoded)
        outcome = hellaswag.evaluate_hellaswag(TorchModel(model, tokenizer), items)
        return len(encoded) - before, outcome.details["logprobs"]

    first, logprobs = evaluate(tokenizer, items)
    assert first > 0
    assert evaluate(tokenizer, items) == (0, logprobs)
    # Another model's tokenizer, or other items, are encoded anew.
    assert evaluate(tiny_lm.tokenizer(True), items)[0] > 0
    assert evaluate(tokenizer, items[:2])[0] > 0


def test_logits_held_at_once_follow_the_devices_memory(monkeypatch):
    entries = {}
    for gigabytes in (8, 24, 141):
        properties = SimpleNamespace(total_memory=gigabytes << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        entries[gigabytes] = scoring._logits_entries(torch.device("cuda"))
        assert 4 * entries[gigabytes] <= gigabytes << 30 >> 5
    assert scoring._logits_entries(torch.device("cpu")) < entries[8] < entries[24] == entries[141] == 1 << 27
