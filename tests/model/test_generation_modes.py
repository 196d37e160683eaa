"""What transformers' callers may ask for is computed, or refused in one line at the first call."""

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LogitsProcessorList, StaticCache

from diffquant import load
from diffquant.errors import NonFiniteError, UsageError
from diffquant.model.cache import PackedCache
from diffquant.model.modeling import DiffTransformerModel
from diffquant.recipe import Recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.models import ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test

KINDS = ["diffllama", "unilm-v2", "phi4flash", "motif3"]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Prompts that repeat, so that what stands in them is drafted.
IDS = random_ids(1, 7).repeat(1, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    return {kind: write_checkpoint(root / kind, kind) for kind in KINDS}


def asked(model, **options):
    return model.generate(IDS, **GREEDY, **options)


def refused(said, act, *arguments, **options):
    with pytest.raises(UsageError, match=said) as fault:
        act(*arguments, **options)
    assert "\n" not in str(fault.value)


@in_one_test("kind", KINDS)
def test_caches_with_room_for_tokens_to_come_are_refused(folders, kind):
    model = load(folders[kind])
    for name in ("static", "offloaded_static", "sliding_window"):
        refused(f"cache_implementation='{name}' allocates memory", asked, model, cache_implementation=name)
    config = GenerationConfig(cache_implementation="static", **GREEDY)
    refused("'static' allocates memory", model.generate, IDS, generation_config=config)
    fixed = StaticCache(config=model.config, max_cache_len=32)
    refused("StaticCache with layers of kind Static", model, IDS, past_key_values=fixed)
    refused("StaticCache with layers of kind Static", asked, model, past_key_values=fixed)
    refused("is a tuple, not a cache", model, IDS, past_key_values=())


@in_one_test("kind", KINDS)
def test_a_cache_that_would_not_keep_the_recipe_is_refused(folders, kind):
    model = load(folders[kind], Recipe.of(kv="4:row"))
    refused("is a DynamicCache, and the model's recipe has k 4:row", model, IDS, past_key_values=DynamicCache())
    refused("is a DynamicCache, and the model's", asked, model, past_key_values=DynamicCache())
    for name in ("dynamic", "quantized"):
        refused(f"'{name}' would not store", asked, model, cache_implementation=name)
    cache = model.new_cache()
    model.apply_recipe(Recipe.of(k="8:row", v="4:row"))
    said = "cache belongs to another recipe: it has k 4:row, v 4:row, and the model k 8:row, v 4:row"
    refused(said, model, IDS, past_key_values=cache)
    model.apply_recipe(Recipe.of(kv="4:row", overrides={"*.layers.1.*.k": "8:row"}))
    refused(r"the model k 4:row, v 4:row, \*.layers.1.\*.k 8:row", model, IDS, past_key_values=cache)


def test_growing_caches_serve_16_bits_as_the_models_own():
    oracle = random_diffllama(num_key_value_heads=4)
    model = ours(oracle)
    expected = asked(oracle)
    for options in ({}, {"cache_implementation": "dynamic"}, {"past_key_values": DynamicCache()}, {"use_cache": False}):
        assert torch.equal(asked(model, **options), expected)
    refused("moves a cache off a GPU", asked, model, cache_implementation="offloaded")


@in_one_test("recipe", [{}, {"kv": "4:row"}])
def test_a_configuration_without_a_cache_gives_the_tokens_of_one_with_it(recipe):
    model = ours(random_diffllama(num_key_value_heads=4))
    model.apply_recipe(Recipe.of(**recipe))
    expected = asked(model)
    assert torch.equal(model.generate(IDS, GenerationConfig(use_cache=False, **GREEDY)), expected)
    model.generation_config.use_cache = False
    assert torch.equal(asked(model), expected)
    assert torch.equal(model.generate(IDS, GenerationConfig(**GREEDY)), expected)


@in_one_test("recipe", [{}, {"kv": "4:row"}])
def test_a_cache_is_taken_by_either_of_transformers_names(recipe):
    model = ours(random_diffllama(num_key_value_heads=4))
    model.apply_recipe(Recipe.of(**recipe))
    expected = asked(model)
    for name in ("cache", "past_key_values"):
        held = model.new_cache()
        assert torch.equal(asked(model, **{name: held}), expected)
        assert held.get_seq_length() == IDS.shape[1] + GREEDY["max_new_tokens"] - 1
        for reader in (model, model.model):
            held = model.new_cache()
            reader(IDS, **{name: held})
            assert held.get_seq_length() == IDS.shape[1]
    both = {"cache": model.new_cache(), "past_key_values": model.new_cache()}
    for act in (model, model.model, model.generate):
        refused("got both cache and past_key_values", act, IDS, **both)


EXACT = [
    {},
    {"residual": 3},
    {"kv": "8"},
    {"k": "4:g4", "v": "6:row:rotated"},
    {"kv": "8", "logits": "6:row:shift", "qk": "8:row"},
]
DEPENDENT = {
    "newest 3 tokens in the cache stay at 16 bits": {"kv": "8", "residual": 3},
    "keys at 4:c4 are rounded by blocks of tokens": {"k": "4:c4", "v": "8"},
    "keys at 8:c16 are rounded by blocks": {"overrides": {"*.layers.1.*.k": "8:c16"}},
    "logits at 6:tensor have scales over several tokens": {"logits": "6:tensor"},
    "logits at 8:b4 have": {"logits": "8:b4"},
    "queries and keys at 8:head have": {"qk": "8:head"},
    "queries and keys at 8:row:smooth have": {"qk": "8:row:smooth"},
}


@in_one_test("recipe", EXACT)
def test_drafts_and_prompts_in_chunks_give_the_tokens_of_greedy_search(recipe):
    model, assistant = ours(random_diffllama(num_key_value_heads=4)), ours(random_llama(seed=1))
    model.apply_recipe(Recipe.of(**recipe))
    expected = asked(model)
    twin = ours(random_diffllama(num_key_value_heads=4))
    twin.apply_recipe(Recipe.of(k="4:c4", v="4:row", residual=2))
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}, {"assistant_model": twin}):
        assert torch.equal(asked(model, **options), expected)
    assert torch.equal(asked(model, prefill_chunk_size=5), expected)


@in_one_test(("said", "recipe"), DEPENDENT.items())
def test_drafts_and_chunks_that_would_change_the_tokens_are_refused(said, recipe):
    model = ours(random_diffllama(num_key_value_heads=4))
    model.apply_recipe(Recipe.of(**recipe))
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": ours(random_llama(seed=1))}):
        refused(said, asked, model, **options)
    refused(f"prefill_chunk_size would change the generated tokens.*{said}", asked, model, prefill_chunk_size=5)
    refused(said, model.generate, IDS, GenerationConfig(prefill_chunk_size=5, **GREEDY))
    config = GenerationConfig(prompt_lookup_num_tokens=3, **GREEDY)
    refused(said, model.generate, IDS, config)
    model.generation_config = config
    refused(said, model.generate, IDS, GenerationConfig(**GREEDY))


# Settings under which angles are those of short texts up to 12 tokens.
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 12}
MOVING = [
    {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4} | _FACTORS, "head_dim": 16},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 12},
]


@in_one_test("changes", MOVING)
def test_drafts_and_chunks_that_would_change_angles_are_refused(changes):
    """Stock transformers changes them, and with them tokens, without a word."""
    oracle = random_llama(num_key_value_heads=4, **changes)
    model, few, drafted = ours(oracle), IDS[:, :8], {"prompt_lookup_num_tokens": 3}
    longer, chunked = GREEDY | {"max_new_tokens": 24}, {"prefill_chunk_size": 5}
    for ids, options in (IDS, chunked), (few, drafted):
        expected = oracle.generate(ids, **longer)
        assert torch.equal(model.generate(ids, **longer), expected)
        assert not torch.equal(oracle.generate(ids, **longer, **options), expected)
        refused("above 12 tokens the angles of RoPE", model.generate, ids, **longer, **options)
    refused("above 12 tokens", model.generate, few, do_sample=False, pad_token_id=0, **drafted)
    assert torch.equal(model.generate(few, **longer, **chunked), oracle.generate(few, **longer))
    shorter = GREEDY | {"max_new_tokens": 4}
    assert torch.equal(model.generate(few, **shorter, **drafted), oracle.generate(few, **shorter))


@in_one_test(("kind", "target"), [("motif3", "logits"), ("motif3", "p"), ("phi4flash", "logits")])
def test_chunks_that_would_move_groups_of_keys_in_windows_are_refused(folders, kind, target):
    model = load(folders[kind]).double()
    for scheme in ("4:row", "4:g4"):
        model.apply_recipe(Recipe.of(**{target: scheme}))
        cache = model.new_cache()
        for chunk in IDS.split(5, 1):
            logits = model(chunk, past_key_values=cache).logits[:, -1]
        is_same = torch.allclose(logits, model(IDS).logits[:, -1], rtol=0, atol=1e-4)
        assert is_same == (scheme == "4:row")
    refused("at 4:g4 have scales over several keys", asked, model, prefill_chunk_size=5)


def test_states_that_cannot_go_back_are_no_drafts(folders):
    phi, llama = load(folders["phi4flash"]), random_llama()
    said = "Mamba's states and this model's windowed layers do not keep earlier tokens"
    refused(said, asked, phi, prompt_lookup_num_tokens=3)
    refused(said, asked, phi, assistant_model=llama)
    refused(said, asked, ours(llama), assistant_model=phi)
    refused(said, asked, llama, assistant_model=phi)
    refused("runs all of its layers", asked, ours(llama), assistant_early_exit=1)


def test_the_kernels_cache_is_no_assistants_where_its_blocks_would_be_divided(monkeypatch):
    drafter, model = ours(random_llama()), ours(random_llama())
    drafter.apply_recipe(Recipe.of(k="4:c16", v="4:row"))
    monkeypatch.setattr(DiffTransformerModel, "has_fused_cache", True)
    refused("keys at 4:c16 are packed by blocks", asked, model, assistant_model=drafter)


@in_one_test("kind", KINDS)
def test_continuous_batching_is_refused(folders, kind):
    model = load(folders[kind])
    refused("continuous batching", model.generate_batch, [[1, 2, 3]], max_new_tokens=3)
    refused("continuous batching", asked, model, cache_implementation="paged")
    with pytest.raises(UsageError, match="continuous batching"), model.continuous_batching_context_manager():
        pass


@in_one_test("kind", KINDS)
def test_attention_maps_are_refused_wherever_they_are_asked_for(folders, kind):
    model, said = load(folders[kind]), "output_attentions is not supported"
    refused(said, model, IDS, output_attentions=True)
    refused(said, asked, model, output_attentions=True, return_dict_in_generate=True)
    # With another, transformers' configuration refuses it itself.
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    refused(said, model, IDS)


def test_the_configuration_chooses_outputs_as_in_transformers():
    oracle = random_diffllama()
    model = ours(oracle)
    for each in (oracle, model):
        each.config.output_hidden_states = True
    found, expected = model(IDS).hidden_states, oracle(IDS).hidden_states
    assert len(found) == len(expected)
    for pair in zip(found, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-4)
    logits, *_ = model(IDS, return_dict=False)
    torch.testing.assert_close(logits, oracle(IDS).logits, rtol=0, atol=1e-4)


def backends(model):
    return {attention.backend for attention in model.attention_modules}


@in_one_test("kind", KINDS)
def test_attn_implementation_chooses_the_backend(folders, kind, tmp_path):
    expected = load(folders[kind])(IDS).logits
    for name, backend in {"eager": "naive", "sdpa": "auto"}.items():
        model = load(folders[kind])
        model.set_attn_implementation(name)
        assert backends(model) == {backend}
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-4)
        if kind != "diffllama":
            opened = AutoModelForCausalLM.from_pretrained(folders[kind], attn_implementation=name)
            assert backends(opened) == {backend}
    for name in ("flex_attention", "kernels-community/flash-attn", None):
        refused("is not supported; choose sdpa, eager", model.set_attn_implementation, name)
    model.set_attn_implementation({"": "flash_attention_2"})
    refused("flash-attn runs on CUDA only", model, IDS)
    model.apply_recipe(Recipe.of(logits="6:row"))
    refused("'flash_attn' keeps logits inside", model.set_attn_implementation, "flash_attention_2")


def test_a_cache_may_be_brought_to_a_model_of_16_bits():
    model = ours(random_llama())
    cache = PackedCache(Recipe.of(kv="8"), 3)
    model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("kind", ["diffllama", "phi4flash"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=str)
def test_logits_that_overflow_are_refused_with_the_layer_where_that_begins(folders, kind, options):
    model = load(folders[kind], dtype="float16")
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS], 1)
    mask = (torch.arange(ids.shape[1]) >= 4).long()[None]
    model.generate(ids, attention_mask=mask, **GREEDY | options)
    for name, parameter in model.model.layers[1].named_parameters():
        if "down_proj" in name or "fc2" in name:
            parameter.fill_(60000.0)
    with pytest.raises(NonFiniteError, match=r"model.layers.1 computes NaN or infinity in float16.*in bfloat16"):
        model.generate(ids, attention_mask=mask, **GREEDY | options)
    embeddings = model.model.embed_tokens(ids)
    with pytest.raises(NonFiniteError, match="the model computes NaN or infinity in float16"):
        model.generate(inputs_embeds=embeddings, attention_mask=mask, **GREEDY | options)


def test_a_head_that_overflows_is_named():
    model = ours(random_llama()).half()
    model.lm_head.weight.data.fill_(60000.0)
    with pytest.raises(NonFiniteError, match="lm_head computes NaN or infinity"):
        asked(model)


def test_tokens_that_are_ruled_out_are_no_overflow():
    oracle = random_llama()
    model, barred = ours(oracle), [[token] for token in range(80)]
    assert torch.equal(asked(model, bad_words_ids=barred), asked(oracle, bad_words_ids=barred))

    def allow_none(_ids, scores):
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(NonFiniteError):
        asked(model, logits_processor=LogitsProcessorList([allow_none]))


class Adapted(nn.Module):
    """A Linear with an adapter beside it, as peft puts it in the Linear's place."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.weight, self.bias = base_layer, base_layer.weight, base_layer.bias
        sizes = ((2, base_layer.in_features), (base_layer.out_features, 2))
        self.down, self.up = (nn.Parameter(0.3 * torch.randn(size).to(self.weight.dtype)) for size in sizes)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


@in_one_test("kind", ["unilm-v2", "gated", "phi4flash", "motif3"])
def test_an_adapter_of_any_linear_counts_as_it_does_once_it_is_merged(tmp_path, kind):
    source = write_checkpoint(tmp_path / "source", kind)
    for dtype, atol in ((torch.float64, 1e-4), (torch.bfloat16, None)):
        adapted, merged = (load(source, dtype=dtype) for _ in range(2))
        for name, linear in [(n, each) for n, each in adapted.model.named_modules() if type(each) is nn.Linear]:
            adapted.model.set_submodule(name, adapter := Adapted(linear))
            merged.model.get_parameter(f"{name}.weight").add_(adapter.up.detach() @ adapter.down.detach())
        logits = adapted(IDS).logits
        assert logits.isfinite().all()
        if atol is not None:
            torch.testing.assert_close(logits, merged(IDS).logits, rtol=0, atol=atol)
            assert torch.equal(asked(adapted), asked(merged))


def test_a_model_that_accelerate_offloads_computes_the_same(folders):
    expected = load(folders["unilm-v2"])(IDS).logits
    offloaded = accelerate.cpu_offload(load(folders["unilm-v2"]), execution_device="cpu")
    assert torch.equal(offloaded(IDS).logits, expected)
