"""The KV store on a CUDA device: codes against `numbers`, attention against the plain form in float64."""

import pytest
import torch

from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import decode as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import expected, padding, random_call, relative_error

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Every kernel is compiled anew for each, at a second or more.
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
LONG = 65_536
RECIPES = [
    Recipe.of(),
    Recipe.of(kv=8),
    Recipe.of(k="4:c64", v=4, residual=64),
    Recipe.of(kv=4),
    Recipe.of(k="6:c128", v=6, residual=5),
    Recipe.of(k="8:c16", v=16),
    Recipe.of(k=16, v=6, residual=33),
]

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def named(recipe):
    return f"{recipe.k}-{recipe.v}-{recipe.residual}"


def both(k):
    return k[0] if k[0] is k[-1] else torch.cat(list(k), 1)


def stored(recipe, k, v, capacity=None):
    """A store that holds these, filled by a prompt and then token by token."""
    keys = both(k)
    store = KVStore(recipe, keys, v, capacity or keys.shape[2])
    prompt = max(keys.shape[2] - 3, 1)
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, keys.shape[2]))):
        append(store, keys[:, :, part], v[:, :, part])
    return store


def wanted(q, store, k, lam, **options):
    keys, v = store.read()
    return expected(q, list(keys.chunk(2, 1)) if k[0] is not k[-1] else [keys] * len(k), v, lam, **options)


def quantize_as_stored(x, scheme, residual):
    """What must be read back of states [B, H, S, w]."""
    block = scheme.sharing.tokens_per_scale
    packed = max(x.shape[2] - residual, 0) // block * block if scheme.quantizes else 0
    if not packed:
        return x
    view, dim = scheme.sharing.view(x[:, :, :packed])
    scale = scheme.format.compute_scale(view, dim, x.dtype)
    old = scheme.format.decode(scheme.format.encode(view, scale), scale).reshape(*x.shape[:2], packed, -1)
    return torch.cat([old, x[:, :, packed:]], 2)


@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [((300, 1, 1, 1), torch.float16), ((1, 63, 1, 100, 7), torch.bfloat16), ((129, 16, 500), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_what_is_stored_are_the_codes_of_numbers(recipe, dtype, chunks):
    _, k, v, _ = random_call("v1", 1, sum(chunks), width=128, kv_pairs=2, batch=2, dtype=dtype, device=DEVICE)
    k = both(k)
    store = KVStore(recipe, k, v, sum(chunks))
    for k_chunk, v_chunk in zip(k.split(chunks, 2), v.split(chunks, 2), strict=True):
        append(store, k_chunk, v_chunk)
    # On the CPU, where a division by a number is one; CUDA multiplies by its reciprocal.
    for read, states, scheme in zip(store.read(), (k, v), (recipe.k, recipe.v), strict=True):
        assert torch.equal(read.cpu(), quantize_as_stored(states.cpu(), scheme, recipe.residual))
    assert store.progress.tolist()[0] == store.length == sum(chunks)


@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_equals_the_plain_form(generation, recipe, dtype, width):
    q, k, v, lam = random_call(
        generation, 1, 1000, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype, device=DEVICE
    )
    store = stored(recipe, k, v)
    out = decode(q, store, lam, scale=width**-0.5)
    reference = wanted(q, store, k, lam, scale=width**-0.5)
    assert relative_error(out, reference) <= LIMITS[dtype]
    assert torch.cosine_similarity(out.double().flatten(), reference.flatten(), 0) > 0.9999


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (1, 1, Mask()),
        (3, 129, Mask()),
        (16, 1000, Mask()),
        (5, 3, Mask()),
        (4, 300, padding(300, starts=[0, 141], device=DEVICE)),
        (2, 300, padding(300, starts=[299, 300], device=DEVICE)),
        (9, 300, padding(300, starts=[7, 0], ends=[300, 295], device=DEVICE)),
        (2, 300, Mask(window=70)),
    ],
    ids=["one key", "chunk", "16", "more queries than keys", "left padding", "padded queries", "ragged", "window"],
)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_what_a_query_sees(generation, queries, keys, mask):
    q, k, v, lam = random_call(generation, queries, keys, pairs=8, kv_pairs=2, batch=2, device=DEVICE)
    store = stored(Recipe.of(k="4:c64", v=4, residual=20), k, v)
    out = decode(q, store, lam, scale=0.125, mask=mask)
    assert relative_error(out, wanted(q, store, k, lam, scale=0.125, mask=mask)) <= LIMITS[torch.float16]


@pytest.mark.parametrize("recipe", RECIPES[1:3], ids=named)
def test_pairs_that_share_a_noise_head_read_it_once(recipe):
    q, k, v, lam = random_call("v1", 1, 300, width=128, pairs=8, kv_pairs=2, batch=2, device=DEVICE)
    q = [q[0], q[1][:, ::4]]
    store = stored(recipe, k, v)
    out = decode(q, store, lam, scale=128**-0.5)
    assert relative_error(out, wanted(q, store, k, lam, scale=128**-0.5)) <= LIMITS[torch.float16]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_pair_norm_is_part_of_the_kernel(dtype):
    q, k, v, lam = random_call("v1", 1, 300, width=128, dtype=dtype, device=DEVICE)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 256, device=DEVICE).to(dtype), 0.64)
    store = stored(Recipe.of(kv=8), k, v)
    out = decode(q, store, lam, scale=128**-0.5, post=post)
    reference = wanted(q, store, k, lam, scale=128**-0.5, post=post)
    assert relative_error(out, reference) <= LIMITS[dtype]


@pytest.mark.parametrize("size", [1e-5, 1e4])
def test_small_and_large_values_keep_their_precision(size):
    q, k, v, lam = random_call("v2", 1, 1000, dtype=torch.bfloat16, device=DEVICE)
    store = stored(Recipe.of(kv=4), k, (v.float() * size).bfloat16())
    out = decode(q, store, lam, scale=0.125)
    assert relative_error(out, wanted(q, store, k, lam, scale=0.125)) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("recipe", RECIPES[1:4], ids=named)
def test_long_contexts_take_memory_for_partial_sums_alone(recipe):
    q, k, v, lam = random_call("v1", 1, LONG, width=128, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    store = stored(recipe, k, v)
    decode(q, store, lam, scale=128**-0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = decode(q, store, lam, scale=128**-0.5)
    assert torch.cuda.max_memory_allocated() - before <= 32 << 20
    reference = wanted(q, store, k, lam, scale=128**-0.5)
    assert relative_error(out, reference) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_same_inputs_give_the_same_bits(recipe):
    q, k, v, lam = random_call("v1", 1, 5000, pairs=8, kv_pairs=4, batch=4, dtype=torch.bfloat16, device=DEVICE)
    first_store = stored(recipe, k, v)
    first = decode(q, first_store, lam, scale=0.125)
    for _ in range(9):
        store = stored(recipe, k, v)
        held = zip(
            store.keys.tensors + store.values.tensors,
            first_store.keys.tensors + first_store.values.tensors,
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in held)
        assert torch.equal(decode(q, store, lam, scale=0.125), first)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_a_captured_step_is_valid_at_every_length(recipe):
    steps, prompt = 150, 40
    q, k, v, lam = random_call("v1", steps, prompt + steps, kv_pairs=2, dtype=torch.float16, device=DEVICE)
    keys = both(k)
    eager, replayed = (KVStore(recipe, keys, v, prompt + steps) for _ in range(2))
    for store in (eager, replayed):
        append(store, keys[:, :, :prompt], v[:, :, :prompt])

    def inputs(step):
        at = slice(prompt + step, prompt + step + 1)
        return [x[:, :, step : step + 1] for x in q], keys[:, :, at], v[:, :, at]

    static = [x.clone() for x in inputs(0)[0]], *(x.clone() for x in inputs(0)[1:])
    warm = KVStore(recipe, keys, v, prompt + steps)
    append(warm, static[1], static[2])
    decode(static[0], warm, lam, scale=0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(replayed, static[1], static[2])
        out = decode(static[0], replayed, lam, scale=0.125)
    for step in range(steps):
        queries, new_k, new_v = inputs(step)
        for target, source in zip((*static[0], *static[1:]), (*queries, new_k, new_v), strict=True):
            target.copy_(source)
        graph.replay()
        append(eager, new_k, new_v)
        assert torch.equal(out, decode(queries, eager, lam, scale=0.125))
    replayed.length = prompt + steps
    assert all(torch.equal(a, b) for a, b in zip(replayed.read(), eager.read(), strict=True))


def test_replays_beyond_the_capacity_touch_nothing_else():
    _, k, v, _ = random_call("v1", 1, 128, dtype=torch.float16, device=DEVICE)
    keys = both(k)
    store = KVStore(Recipe.of(k="4:c64", v=4, residual=3), keys, v, 128)
    append(store, keys[:, :, :126], v[:, :, :126])
    for _ in range(5):
        store.length = 0
        append(store, keys[:, :, :1], v[:, :, :1])
    assert store.progress.tolist()[0] == 128


def test_a_compiled_step_gives_the_same():
    q, k, v, lam = random_call("v1", 1, 300, device=DEVICE)
    keys = both(k)
    recipe = Recipe.of(k="4:c64", v=4, residual=7)
    stores = [KVStore(recipe, keys, v, 512) for _ in range(2)]

    def step(store, new_k, new_v):
        append(store, new_k, new_v)
        return decode(q, store, lam, scale=0.125) * 2

    compiled = torch.compile(step)
    for part in (slice(0, 100), slice(100, 101), slice(101, 300)):
        outs = [f(store, keys[:, :, part], v[:, :, part]) for f, store in zip((step, compiled), stores, strict=True)]
        assert torch.equal(*outs)
