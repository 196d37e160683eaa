"""What vLLM computes of folders with rounded activations on a processor."""

from statistics import mean

import pytest
import torch

import diffquant
from diffquant.model import inputs
from tests.vllm.answers import expected, record
from tests.vllm.checkpoints import write_served

SOURCES = ("diffllama", "unilm-v2")
# vLLM's int8 kernel, the plugin's for words of codes, and vLLM's for FP8.
RECIPES = {
    "w8a8": {"weights": "8:channel", "activations": 8},
    "w4a8": {"weights": "4:g32", "activations": 8},
    "fp8": {"weights": "e4m3:channel", "activations": "fp8"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("folders"), {}
    for source in SOURCES:
        write_served(root / source, source)
        for name, recipe in RECIPES.items():
            made[source, name] = root / f"{source}-{name}"
            diffquant.quantize(root / source, made[source, name], recipe)
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (40, 7)]


@pytest.fixture(scope="module")
def answers(engine, folders, prompts):
    found, _ = engine([{"folder": str(folder), "prompts": prompts} for folder in folders.values()])
    return dict(zip(folders, found, strict=True))


def round_by_127(x, scheme):
    """As vLLM's kernel for processors rounds: absmax over the largest code, 127."""
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (scheme.bits - 1) - 1)
    return (x / torch.where(scale == 0, 1.0, scale)).round() * scale


def distance(rounds, wanted):
    """The mean difference of an engine's log-probabilities from a model's."""
    assert not isinstance(rounds, str), rounds
    pairs = [pair for answers in rounds for pair in zip(answers, wanted, strict=True)]
    return mean(abs(a - b) for found, want in pairs for a, b in zip(found["prompt"], want["prompt"], strict=True))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("source", SOURCES)
def test_inputs_are_rounded_as_diffquant_rounds_them(answers, folders, prompts, source, name, monkeypatch):
    """But for values that sums in another order send to another code; vLLM's int8 kernel has its own scale."""
    recipe, folder = RECIPES[name], folders[source, name]
    unrounded = expected(folder, prompts)
    if name == "w8a8":
        monkeypatch.setattr(inputs, "round_inputs", round_by_127)
    rounded = expected(folder, prompts, activations=recipe["activations"])
    assert distance(answers[source, name], rounded) < 0.5 * distance(answers[source, name], unrounded)
    record("plugin", source, recipe["weights"], None, None, activations=str(recipe["activations"]))
