"""Decoding from recorded steps: the tokens of unrecorded ones, on a stand-in for CUDA graphs that runs on a CPU.

What needs a device is in tests/gpu/test_graphed_steps.py.
"""

import copy
import gc
import logging
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from diffquant.kernels.cache import append, decode, decode_split
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.model import graphed_steps
from diffquant.model.adapters import adapter_for
from diffquant.model.cache import PackedCache
from diffquant.model.fused_cache import FusedCache
from diffquant.model.graphed_steps import GraphedSteps
from diffquant.model.modeling import DiffTransformerModel
from diffquant.recipe import Recipe
from diffquant.verbs.generation import stream
from tests.support import recorded, tiny_lm
from tests.support.models import SIZES, ours, random_diffllama, random_ids, random_llama
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

pytest.importorskip("triton")

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


class Recordings:
    """Stand-in for `record_cuda_graph` that counts.

    Attributes:
        replays: number of replays of each recording.
    """

    def __init__(self):
        self.replays = []

    def __call__(self, work, device):
        (replay_one, result), number = recorded.record(work, device), len(self.replays)
        self.replays.append(0)

        def replay():
            self.replays[number] += 1
            replay_one()

        return replay, result


@pytest.fixture
def recordings(monkeypatch):
    made = Recordings()
    monkeypatch.setattr(graphed_steps, "record_cuda_graph", made)
    monkeypatch.setattr(DiffTransformerModel, "new_graphs", DiffTransformerModel.reuse_or_create_graphs)
    return made


class Never(GraphedSteps):
    """Steps that are never recorded."""

    def run(self, *_):
        return None


class Filled:
    """As much of a cache as a step asks: it stays in place, and has as many tokens as it is told."""

    capacity, storage_versions = 4, (1,)

    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        return self.length

    def set_length(self, length):
        self.length = length


def test_no_step_is_replayed_into_a_cache_that_is_full(recordings):
    """A kernel would write beyond its end."""
    steps, cache = GraphedSteps(), Filled(2)
    x, positions = torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.long)
    ran = [steps.run(lambda x, *_: x + 1, cache, x, positions, None) is not None for _ in range(5)]
    assert ran == [False, True, True, False, False]
    assert (cache.length, recordings.replays) == (cache.capacity, [2])


@pytest.mark.parametrize("changed", ["place", "batch", "positions", "dtype", "device", "mask"])
def test_a_recording_is_replayed_for_what_it_was_made_of_alone(changed, recordings):
    """A graph would go on with the addresses and the batch that it was recorded with."""
    steps, cache = GraphedSteps(), Filled(0)
    x, positions, mask = torch.zeros(2, 1, 8), torch.zeros(1, 1, dtype=torch.long), None

    def ran():
        return steps.run(lambda x, *_: x + 1, cache, x, positions, mask)

    assert [ran() is not None for _ in range(2)] == [False, True]
    if changed == "place":
        cache.storage_versions = (2,)
    if changed == "batch":
        x = x[:1]
    if changed == "positions":
        positions = positions.repeat(2, 1)
    if changed == "dtype":
        x = x.double()
    if changed == "device":
        x, positions = x.to("meta"), positions.to("meta")
    if changed == "mask":
        mask = torch.ones(2, 2, dtype=torch.long)
    assert ran() is None
    y = ran()
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert recordings.replays == [1, 1]


class TwoDevices:
    """Stand-in for torch.cuda of a machine with two GPUs, the first of them current, which says what was captured."""

    def __init__(self, monkeypatch):
        self.current, self.captured = 0, []
        for name in ("graph", "device", "Stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "default_generators", (None, self))

    def clone_state(self):
        return "state"

    def graphsafe_set_state(self, state):
        assert (state, self.captured) == ("state", [])

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def Stream(self, device=None):
        return SimpleNamespace(device=torch.device("cuda", self.current) if device is None else device)

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def graph(self, graph, stream=None, capture_error_mode="global"):
        yield
        # torch makes one stream for all captures, on the device that was current then.
        self.captured.append((self.current, (stream or self.Stream()).device))


@in_one_test("fails", [False, True])
def test_a_step_is_captured_on_the_device_of_its_tensors_whichever_is_current(fails, monkeypatch):
    cuda, device = TwoDevices(monkeypatch), torch.device("cuda", 1)

    def work():
        assert cuda.current == 1
        if fails:
            raise RuntimeError("cannot be captured")

    if fails:
        with pytest.raises(RuntimeError, match="cannot be captured"):
            graphed_steps.record_cuda_graph(work, device)
    else:
        graphed_steps.record_cuda_graph(work, device)
        assert cuda.captured == [(1, device)]


def small_model(generation, **sizes):
    if generation == "v2":
        torch.manual_seed(0)
        return adapter_for(SIZES | SMALL | sizes | {"model_type": "diff_v2"}).architecture.new_model().eval()
    if generation == "v1":
        return ours(random_diffllama(**SMALL | sizes | {"num_key_value_heads": 2}))
    return ours(random_llama(**SMALL | sizes))


def generated(model, recipe, ids, mask=None, steps=None, **settings):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    chosen = {} if steps is None else {"graphed_steps": steps}
    # Without a mask transformers takes every token 0 of the prompt for padding.
    mask = torch.ones_like(ids) if mask is None else mask
    cache = FusedCache(recipe, layers=len(model.attention_modules))
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **chosen, **options), cache


@pytest.mark.parametrize(
    ("generation", "recipe", "padding"),
    sampled(
        [
            ("plain", Recipe.of(), 9),
            ("v1", Recipe.of(k="4:c16", v=4, residual=5), 9),
            ("v2", Recipe.of(kv=8, residual=3), 0),
        ],
        3,
    ),
    ids=["plain-16-bit-padded", "v1-4-bit-padded", "v2-8-bit"],
)
def test_replayed_steps_give_the_tokens_of_unrecorded_ones(generation, recipe, padding, recordings):
    model, ids = small_model(generation), random_ids(length=19)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    wanted, _ = generated(model, recipe, ids, mask, Never())
    made, cache = generated(model, recipe, ids, mask)
    assert torch.equal(made, wanted)
    # The prompt gives the first token and an unrecorded step the second.
    assert recordings.replays == [3]
    store = cache.layers[0].store
    assert store.length == int(store.progress[0]) == 23


def own(model, ids, mask=None, **settings):
    """Tokens of a call that makes its cache itself."""
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | settings
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **options)


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr("diffquant.model.modeling.fused_cache_refusal", lambda *_: None)


def test_calls_of_one_shape_are_recorded_once_with_prompts_and_padding_of_their_own(recordings, fused):
    model, lengths = small_model("v2"), (9, 12)
    plain = [(random_ids(length=length, seed=length), None) for length in lengths]
    padded = [(ids, torch.ones_like(ids)) for ids, _ in plain]
    for (_, mask), padding in zip(padded, (3, 5), strict=True):
        mask[0, :padding] = 0
    for calls, replays in ((plain, [5]), (padded, [5, 5])):
        for call in calls:
            wanted = own(model, *call, max_new_tokens=4, graphed_steps=Never())
            assert torch.equal(own(model, *call, max_new_tokens=4), wanted)
        # Of the first call all but two tokens, of the second all but the prompt's.
        assert recordings.replays == replays


def test_a_recording_is_kept_for_the_model_as_it_is_alone():
    model = small_model("v1")
    signatures = [graphed_steps.signature_of(model)]
    layer = model.model.layers[0]

    def changed():
        signatures.append(graphed_steps.signature_of(model))
        return signatures[-1] not in signatures[:-1]

    assert not changed()
    model.apply_recipe(Recipe.of(kv=8))
    assert changed()
    layer.mlp.gate_proj.weight = torch.nn.Parameter(layer.mlp.gate_proj.weight.clone())
    assert changed()
    model.attention_modules[0].scale *= 2
    assert changed()
    layer.mlp.register_forward_hook(lambda _module, _given, y: -y)
    assert changed()
    model.double()
    assert changed()
    layer.mlp = torch.nn.Identity()
    assert changed()
    model.train()
    assert changed()


OTHER_STORES = {
    "batch": lambda recipe, k, room: (recipe, k[:1], room),
    "heads": lambda recipe, k, room: (recipe, k.repeat(1, 2, 1, 1), room),
    "room": lambda recipe, k, room: (recipe, k, room + 1),
    "dtype": lambda recipe, k, room: (recipe, k.bfloat16(), room),
    "device": lambda recipe, k, room: (recipe, k.to("meta"), room),
    "recipe": lambda recipe, k, room: (Recipe.of(kv=4, residual=16), k, room),
    "residual": lambda recipe, k, room: (Recipe.of(kv=8, residual=17), k, room),
}


@in_one_test("changed", OTHER_STORES)
def test_a_store_is_taken_over_for_the_same_shapes_alone(changed):
    recipe, k = Recipe.of(kv=8, residual=16), torch.zeros(2, 1, 3, 64, dtype=torch.float16)
    store = KVStore(recipe, k, k, 100)
    assert store.has_same_layout(recipe, k[:, :, :1], k[:, :, :1], 128)
    recipe, k, room = OTHER_STORES[changed](recipe, k, 128)
    assert not store.has_same_layout(recipe, k, k, room)


def test_an_emptied_store_is_as_a_new_one():
    k = torch.randn(1, 1, 20, 64).half()
    store, new = (KVStore(Recipe.of(kv=8, residual=4), k, k, 100) for _ in range(2))
    append.append(store, k, k)
    assert store.length == 20
    version = store.storage_version
    store.clear()
    assert (store.length, store.storage_version, store.progress.tolist()) == (0, version, [0] * 4)
    for x, y in zip(store.keys.tensors + store.values.tensors, new.keys.tensors + new.values.tensors, strict=True):
        assert torch.equal(x, y)


def test_recordings_are_of_one_model_and_do_not_keep_it_alive():
    model = small_model("plain")
    kept = GraphedSteps()
    kept._recorded = "a step"
    model.model.keep_graphs(kept)
    copied = copy.deepcopy(model)
    assert copied.model.reuse_or_create_graphs(FusedCache(Recipe.of(), 1), 9)._recorded is None
    gone = weakref.ref(model.model.layers[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@thorough
def test_a_cache_that_grows_is_recorded_again(recordings):
    model, ids = small_model("plain"), random_ids(batch=1, length=125)
    wanted, _ = generated(model, Recipe.of(), ids, None, Never(), max_new_tokens=8)
    made, cache = generated(model, Recipe.of(), ids, max_new_tokens=8)
    assert torch.equal(made, wanted)
    # Tokens 126 to 128 fit beside the prompt; 129 grows the cache, 130 finds it moved, 131 and 132 stay.
    assert recordings.replays == [2, 2]
    assert cache.capacity > 128


@thorough
def test_sampling_ends_and_streams_as_it_does_unrecorded(recordings, monkeypatch):
    model, ids = small_model("v1"), random_ids(length=9)
    drawn = []
    for steps in (Never(), None):
        torch.manual_seed(3)
        drawn.append(generated(model, Recipe.of(), ids, None, steps, do_sample=True, temperature=0.9)[0])
    assert torch.equal(*drawn)
    assert recordings.replays == [3]
    greedy, _ = generated(model, Recipe.of(), ids[:1], None, Never(), max_new_tokens=7)
    end = int(greedy[0, -2])
    made, _ = generated(model, Recipe.of(), ids[:1], max_new_tokens=7, eos_token_id=end)
    assert made[0].tolist() == greedy[0, : greedy[0].tolist().index(end, 9) + 1].tolist()

    monkeypatch.setattr("diffquant.model.modeling.fused_cache_refusal", lambda *what: None)
    tokenizer = tiny_lm.tokenizer()
    model = small_model("plain", vocab_size=tiny_lm.WORDS)
    before = len(recordings.replays)
    pieces = "".join(stream(model, tokenizer, "It was a dark", 6))
    assert recordings.replays[before:] == [4]
    monkeypatch.setattr(DiffTransformerModel, "new_graphs", lambda *_: None)
    assert pieces == "".join(stream(model, tokenizer, "It was a dark", 6)) != ""


@thorough
def test_sequences_that_move_between_steps_are_not_recorded(recordings):
    model, ids = small_model("plain"), random_ids(batch=1, length=9)
    wanted = model.generate(
        ids, past_key_values=PackedCache(Recipe.of(), 1), num_beams=2, max_new_tokens=4, do_sample=False,
        pad_token_id=0, eos_token_id=None, graphed_steps=Never(),
    )  # fmt: skip
    assert torch.equal(generated(model, Recipe.of(), ids, num_beams=2, max_new_tokens=4)[0], wanted)
    assert recordings.replays == []


def test_where_recording_fails_it_is_said_once_and_decoding_goes_on(recordings, monkeypatch, caplog):
    model, ids = small_model("plain"), random_ids(batch=1, length=9)
    wanted, _ = generated(model, Recipe.of(), ids, None, Never())

    def refuses(work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    # What was launched into the recording did not run: only the device's own count tells.
    monkeypatch.setattr(
        graphed_steps, "record_cuda_graph", lambda work, device: recorded.record(lambda: refuses(work), device)
    )
    graphed_steps.warn_of_ungraphed_decoding.cache_clear()
    made, cache = generated(model, Recipe.of(), ids)
    assert torch.equal(made, wanted)
    assert int(cache.layers[0].store.progress[0]) == cache.get_seq_length() == 13
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.endswith("recording failed: operation not permitted when stream is capturing")


def test_a_mask_with_holes_is_left_to_unrecorded_steps(recordings, caplog):
    model, ids = small_model("v1"), random_ids(batch=1, length=9)
    mask = torch.ones_like(ids)
    mask[0, 4] = 0
    graphed_steps.warn_of_ungraphed_decoding.cache_clear()
    wanted, _ = generated(model, Recipe.of(), ids, mask, Never())
    assert torch.equal(generated(model, Recipe.of(), ids, mask)[0], wanted)
    assert recordings.replays == []
    assert "the padding mask has holes" in caplog.text


def test_on_cuda_it_is_said_why_a_model_is_not_recorded(monkeypatch, caplog):
    model = small_model("v1")
    assert model.model.new_graphs() is None
    assert caplog.text == ""
    monkeypatch.setattr("diffquant.model.modeling.fused_cache_refusal", lambda *what: None)
    monkeypatch.setattr(DiffTransformerModel, "device", torch.device("cuda"))
    graphed_steps.warn_of_ungraphed_decoding.cache_clear()
    assert isinstance(model.model.new_graphs(), GraphedSteps)
    model.use_attention("naive")
    assert model.model.new_graphs() is None
    model.use_attention("auto")
    model.apply_recipe(Recipe.of(logits="8:row"))
    assert model.model.new_graphs() is None
    model.apply_recipe(Recipe.of())
    model.model.rotary_emb.rope_type = "dynamic"
    assert model.model.new_graphs() is None
    for reason in ("uses the backend naive", "logits are quantized", "RoPE of type dynamic"):
        assert caplog.text.count(reason) == 1


@in_one_test("generation", ["v1", "v2", "plain"])
def test_a_step_reads_no_tensor_and_has_no_shape_that_depends_on_its_place(generation, monkeypatch):
    """On a device whose tensors hold nothing, so that nothing can be read."""
    monkeypatch.setattr("diffquant.model.fused_cache.compute_capability", lambda _: (9, 0))
    with torch.no_grad(), recorded.kernels_as_operators():
        model = small_model(generation).half().to("meta")
        cache, names = FusedCache(Recipe.of(k="4:c16", v=4, residual=5), 1), []
        valid = torch.ones(2, 128, dtype=torch.bool, device="meta")
        x = torch.zeros(2, 1, 64, dtype=torch.float16, device="meta")
        for position in range(3):
            positions = torch.full((2, 1), position, device="meta")
            mask = graphed_steps.Mask(valid)
            vars(mask)["_padded_ranges"] = valid.sum(1).int(), valid.sum(1).int()
            with recorded.NoHostReads() as reads:
                y = model.model.run_layers(x, mask, position, positions, cache, None)
            names.append(reads.names)
    assert (y.shape, y.device.type) == (x.shape, "meta")
    with pytest.raises(RuntimeError):
        y.sum().item()
    # The first step makes the storage.
    assert names[1] == names[2]
    assert {"diffquant.append.default", "diffquant.decode.default"} <= set(names[1])


class Launched:
    """Stand-in for a kernel, which takes its arguments and runs nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


@in_one_test("recipe", [Recipe.of(), Recipe.of(k="4:c16", v=4, residual=5)])
def test_launches_of_a_step_wait_for_nothing_and_stay_the_same_while_a_cache_fills(recipe, monkeypatch):
    kernels = {name: Launched() for name in ("append_tokens", "decode_key_split", "decode_combine")}
    monkeypatch.setattr(append, "append_tokens", kernels["append_tokens"])
    monkeypatch.setattr(decode, "decode_key_split", kernels["decode_key_split"])
    monkeypatch.setattr(decode_split, "decode_combine", kernels["decode_combine"])
    k, q = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64)
    cache = FusedCache(recipe, 1)
    starts = torch.zeros(1, dtype=torch.int32)
    store = cache.layers[0].append(k, k)
    operations = []
    for _ in range(3):
        with recorded.NoHostReads() as reads:
            held = store.keys.tensors, store.values.tensors, store.progress
            bits = recipe.k.bits, store.keys.tokens_per_scale, recipe.v.bits, recipe.residual
            append._launch(k, k, *held, *bits)
            decode._launch([q], *held, None, starts, starts + 128, None, *bits, False, None, 0.125, False, 0.0, 1.0)
        store.length += 1
        operations.append(reads.names)
    assert operations[0] == operations[1] == operations[2]
    for name, kernel in kernels.items():
        assert len(kernel.grids) >= 3, name
        assert len(set(kernel.grids[-3:])) == 1, name
