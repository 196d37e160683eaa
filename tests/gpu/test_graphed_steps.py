"""Decoding that replays CUDA graphs: the tokens of kernels launched one by one."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("transformers")

from diffquant.model import graphed_steps
from diffquant.model.adapters import adapter_for
from diffquant.recipe import Recipe

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 300,
    "initializer_range": 0.2,
}
KINDS = {"v1": {"model_type": "diffllama", "num_key_value_heads": 2}, "v2": {"model_type": "diff_v2"}}


@pytest.fixture
def recordings(monkeypatch):
    """Number of steps recorded so far, in a list."""
    made = []
    record = graphed_steps.record_cuda_graph
    monkeypatch.setattr(graphed_steps, "record_cuda_graph", lambda *what: made.append(1) or record(*what))
    return made


def half_model(kind):
    torch.manual_seed(0)
    model = adapter_for(SIZES | {"num_key_value_heads": 2} | KINDS[kind]).architecture.new_model()
    return model.to("cuda", torch.float16).eval()


def generated(model, ids, mask=None, **options):
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 40} | options
    # Without a mask transformers takes every token 0 of the prompt for padding.
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **options)


def prompt(batch, length):
    return torch.randint(300, (batch, length), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize(
    "recipe", [Recipe.of(), Recipe.of(kv=8), Recipe.of(k="4:c64", v=4, residual=64)], ids=["16", "8", "4"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_kernels_launched_one_by_one(kind, recipe, padded, recordings):
    model, ids = half_model(kind), prompt(3, 70)
    model.apply_recipe(recipe)
    mask = torch.ones_like(ids)
    mask[1, :31] = not padded
    wanted = generated(model, ids, mask, graphed_steps=None)
    assert recordings == []
    # 110 tokens fit the 128 that the cache begins with.
    assert torch.equal(generated(model, ids, mask), wanted)
    assert len(recordings) == 1


def test_a_cache_that_grows_is_recorded_again(recordings):
    model, ids = half_model("v1"), prompt(1, 120)
    wanted, made = (
        generated(model, ids, max_new_tokens=100, past_key_values=model.new_cache(), **options)
        for options in ({"graphed_steps": None}, {})
    )
    assert torch.equal(made, wanted)
    assert len(recordings) == 2


def test_calls_of_one_shape_are_recorded_once(recordings):
    model, prompts = half_model("v1"), (prompt(3, 70), prompt(3, 75).flip(1))
    wanted = [generated(model, ids, graphed_steps=None) for ids in prompts]
    for ids, tokens in zip(prompts * 2, wanted * 2, strict=True):
        assert torch.equal(generated(model, ids), tokens)
    assert len(recordings) == 1


def test_a_model_on_another_device_than_the_current_one_is_captured_there(recordings):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA device beside the current one")
    model, ids = half_model("v1").to("cuda:1"), prompt(2, 9).to("cuda:1")
    wanted = generated(model, ids, graphed_steps=None)
    assert torch.cuda.current_device() == 0
    assert torch.equal(generated(model, ids), wanted)
    assert len(recordings) == 1


def test_a_replayed_step_waits_for_nothing(recordings, monkeypatch):
    model, ids = half_model("v1"), prompt(2, 9)
    run = graphed_steps.GraphedSteps.run

    def watched(self, *arguments):
        # Recording synchronizes by itself; replays must not.
        torch.cuda.set_sync_debug_mode("error" if recordings else "default")
        try:
            return run(self, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(graphed_steps.GraphedSteps, "run", watched)
    generated(model, ids)
    assert len(recordings) == 1


def test_sampling_goes_on_where_recording_fails(monkeypatch):
    model, ids = half_model("v2"), prompt(2, 9)
    sampled = {"do_sample": True, "temperature": 0.9}
    torch.manual_seed(5)
    wanted = generated(model, ids, graphed_steps=None, **sampled)
    record = graphed_steps.record_cuda_graph

    def waits(work, device):
        return record(lambda: work() * work().sum().item(), device)

    monkeypatch.setattr(graphed_steps, "record_cuda_graph", waits)
    torch.manual_seed(5)
    assert torch.equal(generated(model, ids, **sampled), wanted)
