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


def assert_nearer(rounds, wanted, other, source, name):
    """Check that answers are a model's, but for values that sums in another order send to another code."""
    assert distance(rounds, wanted) < 0.5 * distance(rounds, other)
    recipe = RECIPES[name]
    record("plugin", source, recipe["weights"], None, None, activations=str(recipe["activations"]))


@pytest.mark.parametrize("source", SOURCES)
def test_the_int8_kernel_computes_what_diffquant_computes_with_its_scale(
    answers, folders, prompts, source, monkeypatch
):
    found, unrounded = answers[source, "w8a8"], expected(folders[source, "w8a8"], prompts)
    monkeypatch.setattr(inputs, "round_inputs", round_by_127)
    assert_nearer(found, expected(folders[source, "w8a8"], prompts, activations=8), unrounded, source, "w8a8")


@pytest.mark.parametrize("source", SOURCES)
def test_the_plugins_kernel_rounds_inputs_as_diffquant_does(answers, folders, prompts, source):
    found, unrounded = answers[source, "w4a8"], expected(folders[source, "w4a8"], prompts)
    assert_nearer(found, expected(folders[source, "w4a8"], prompts, activations=8), unrounded, source, "w4a8")


@pytest.mark.parametrize("source", SOURCES)
def test_the_fp8_kernel_rounds_inputs_as_diffquant_does(answers, folders, prompts, source):
    found, unrounded = answers[source, "fp8"], expected(folders[source, "fp8"], prompts)
    assert_nearer(found, expected(folders[source, "fp8"], prompts, activations="fp8"), unrounded, source, "fp8")
