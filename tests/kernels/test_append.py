"""What a store holds after appends, against `PackedStates` after the same ones."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import data, integers, lists, permutations, sampled_from
from torch.library import opcheck
from triton.runtime import interpreter

from diffquant.errors import UsageError
from diffquant.kernels.cache import append as append_module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.model.cache import PackedStates
from diffquant.recipe import Recipe
from tests.support.tables import in_one_test
from tests.support.thorough import sampled


def states(tokens, width, heads=1, dtype=torch.float16, seed=0, batch=1):
    """[B, H, tokens, width] whose channels and tokens differ in size, strided as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, heads, width, generator=generator)
    x = x * torch.rand(tokens, 1, 1, generator=generator) * (3 * torch.rand(width, generator=generator)).exp()
    return x.to(dtype).transpose(1, 2)


def appended(recipe, k, v, chunks, capacity=128):
    store = KVStore(recipe, k, v, capacity)
    twins = PackedStates(recipe.k, recipe.residual), PackedStates(recipe.v, recipe.residual)
    for k_chunk, v_chunk in zip(k.split(chunks, 2), v.split(chunks, 2), strict=True):
        append(store, k_chunk, v_chunk)
        twins[0].append(k_chunk)
        twins[1].append(v_chunk)
    return store, twins


def assert_same(store, twins):
    for read, side, twin in zip(store.read(), (store.keys, store.values), twins, strict=True):
        assert torch.equal(read, twin.read())
        if twin.words is not None:
            packed = twin.words.shape[2]
            assert torch.equal(side._unpack(packed), side.scheme.format.unpack(twin.words, side.width))
            assert torch.equal(side.scales[:, :, : twin.scales.shape[2]], twin.scales)


@pytest.fixture(params=["from the last", "at random"])
def _order_of_programs(request, monkeypatch):
    """Programs of a launch run in any order, as on a device; the interpreter's own is from the first on."""
    own = interpreter.interpreter_builder.set_grid_idx
    generator = random.Random(0)
    orders = {}

    def permuted(x, y, z):
        count = interpreter.interpreter_builder.grid_dim[0]
        if x == 0 or count not in orders:
            orders[count] = list(range(count))
            if request.param == "from the last":
                orders[count].reverse()
            if request.param == "at random":
                generator.shuffle(orders[count])
        own(orders[count][x], y, z)

    monkeypatch.setattr(interpreter.interpreter_builder, "set_grid_idx", permuted)


@pytest.mark.usefixtures("_order_of_programs")
@pytest.mark.parametrize("chunks", [(9, 30), (35, 16)], ids=str)
def test_what_is_stored_does_not_depend_on_the_order_of_programs(chunks):
    """A step may not write into the window what another has yet to pack from it."""
    recipe = Recipe.of(k="4:c16", v=8, residual=7)
    assert_same(*appended(recipe, states(sum(chunks), 64), states(sum(chunks), 64, seed=1), chunks))


@pytest.mark.parametrize(
    ("recipe", "chunks"),
    sampled(
        [
            (Recipe.of(kv=8), (21, 1, 1)),
            (Recipe.of(kv=4, residual=5), (3, 1, 1, 1, 21)),
            (Recipe.of(k="6:c16", v=6), (15, 1, 1, 20)),
            (Recipe.of(k="4:c16", v=8, residual=17), (1, 35, 1, 11)),
            (Recipe.of(k=16, v=6, residual=3), (5, 1, 19)),
            (Recipe.of(k="8:c32", v=16, residual=1), (33, 31, 1)),
            (Recipe.of(), (7, 1)),
        ],
        2,
    ),
    ids=lambda x: f"{x.k}-{x.v}-{x.residual}" if isinstance(x, Recipe) else "",
)
def test_codes_and_scales_are_those_of_packed_states(recipe, chunks):
    tokens = sum(chunks)
    assert_same(*appended(recipe, states(tokens, 64, heads=2), states(tokens, 128, seed=1), chunks))


def test_float32_states_and_any_strides():
    k = states(40, 128, dtype=torch.float32)[..., ::2]
    v = states(64, 80, dtype=torch.float32, seed=1).transpose(2, 3)[:, :, :40, :64]
    assert v.stride(-1) != 1
    store, twins = appended(Recipe.of(k="6:c16", v="4", residual=2), k, v, (23, 17))
    assert_same(store, twins)


@settings(max_examples=6)
@given(data())
def test_any_recipe_strides_and_chunks(draw):
    """Codes are what quantizing all packed tokens at once gives: chunks, window and layout leave no trace."""
    bits, v_bits, block = (draw.draw(sampled_from(x)) for x in ((4, 6, 8), (4, 6, 8, 16), (1, 16)))
    recipe = Recipe.of(k=f"{bits}:c16" if block > 1 else bits, v=v_bits, residual=draw.draw(integers(0, 20)))
    chunks = draw.draw(lists(integers(1, 22), min_size=1, max_size=3))
    order = draw.draw(permutations(range(4)))
    store = None
    k = v = None
    for seed, tokens in enumerate(chunks):
        shape = torch.empty(1, 1, tokens, 64).permute(order).shape
        back = [order.index(axis) for axis in range(4)]
        generator = torch.Generator().manual_seed(seed)
        new_k, new_v = (torch.randn(shape, generator=generator).half().permute(back) for _ in range(2))
        store = store or KVStore(recipe, new_k, new_v, 128)
        append(store, new_k, new_v)
        k, v = (new if old is None else torch.cat([old, new], 2) for old, new in ((k, new_k), (v, new_v)))
    for read, states, side in zip(store.read(), (k, v), (store.keys, store.values), strict=True):
        packed = side.count_packed(store.length, 0)
        if side.scheme.quantizes and packed:
            scheme = side.scheme
            view, dim = scheme.sharing.view(states[:, :, :packed])
            scale = scheme.format.compute_scale(view, dim, states.dtype)
            old = scheme.format.decode(scheme.format.encode(view, scale), scale).reshape(states[:, :, :packed].shape)
            states = torch.cat([old, states[:, :, packed:]], 2)
        assert torch.equal(read, states)


def test_sequences_and_heads_stand_apart():
    k, v = states(9, 64, heads=4, batch=2), states(9, 64, heads=2, batch=2, seed=1)
    assert_same(*appended(Recipe.of(kv=4, residual=4), k, v, (8, 1)))


@in_one_test("extreme", [torch.finfo(torch.float16).max, torch.finfo(torch.float16).smallest_normal / 8])
def test_huge_and_tiny_states(extreme):
    x = torch.zeros(1, 1, 3, 64, dtype=torch.float16)
    x[..., ::2], x[..., 1::2], x[:, :, 1] = extreme, -extreme, 0
    store, twins = appended(Recipe.of(k=8, v=4), x, x, (3,))
    assert_same(store, twins)


@in_one_test(("forgotten", "then"), [(3, 9), (9, 1), (20, 12)])
def test_the_newest_tokens_are_forgotten(forgotten, then):
    recipe, k, v = Recipe.of(k=8, v=4, residual=6), states(25, 64), states(25, 64, seed=1)
    store, twins = appended(recipe, k, v, (24, 1))
    store.crop(forgotten)
    for twin in twins:
        twin.crop(forgotten)
    assert_same(store, twins)
    k, v = states(then, 64, seed=2), states(then, 64, seed=3)
    append(store, k, v)
    twins[0].append(k)
    twins[1].append(v)
    assert_same(store, twins)


def test_a_packed_block_is_forgotten_whole_or_not_at_all():
    store, _ = appended(Recipe.of(k="4:c16", v=4), states(33, 64), states(33, 64), (33,))
    with pytest.raises(UsageError, match="token 30 lies within a packed block of 16"):
        store.crop(3)
    store.crop(1)
    assert store.length == 32
    store.crop(16)
    assert store.progress.tolist() == [16, 16, 16, 0]


def test_a_store_grows_and_keeps_what_it_holds():
    recipe = Recipe.of(k="6:c16", v=4, residual=2)
    store, _ = appended(recipe, states(37, 64), states(37, 64, seed=1), (37,))
    before = store.read()
    with pytest.raises(UsageError, match="37 \\+ 92 tokens do not fit a capacity of 128; grow"):
        append(store, states(92, 64), states(92, 64))
    store.grow(129)
    assert store.capacity == 256
    assert all(torch.equal(a, b) for a, b in zip(store.read(), before, strict=True))


def test_what_does_not_fit_the_store_is_named():
    store = KVStore(Recipe.of(kv=4), states(1, 64, heads=2), states(1, 128), 128)
    with pytest.raises(UsageError, match=r"append: k is torch.float16 \[1, 1, 1, 64\].*\[1, 2, 1, 64\]"):
        append(store, states(1, 64), states(1, 128))
    with pytest.raises(UsageError, match=r"append: v is torch\.float32"):
        append(store, states(1, 64, heads=2), states(1, 128, dtype=torch.float32))


@in_one_test(
    ("recipe", "width", "message"),
    [
        (Recipe.of(k="4:g32", v=4), 64, "k has scales per group of channels"),
        (Recipe.of(k="4:c24", v=4), 64, "k has blocks of 24 tokens; the kernels support c16, c32"),
        (Recipe.of(k=4, v=5), 64, "v has 5 bits; the kernels support 4, 6, 8 and 16"),
        (Recipe.of(kv=4), 48, "keys are 48 and values 48 wide; the kernels support 64 and 64, 64 and 128"),
    ],
)
def test_what_no_kernel_takes_is_refused_with_a_reason(recipe, width, message):
    with pytest.raises(UsageError, match=message):
        KVStore(recipe, states(1, width), states(1, width), 128)


def test_four_bits_store_at_most_0_30_of_16_bits_at_4k_tokens():
    k = v = states(1, 64, heads=4)
    packed, full = (KVStore(r, k, v, 4096).nbytes for r in (Recipe.of(k="4:c64", v="4:row", residual=64), Recipe.of()))
    assert 4 / 16 * full <= packed <= 0.30 * full


def test_the_operator_declares_what_it_changes():
    k, v = states(3, 64), states(3, 64, seed=1)
    store = KVStore(Recipe.of(kv=4, residual=1), k, v, 128)
    arguments = (k, v, store.keys.tensors, store.values.tensors, store.progress, 4, 1, 4, 1)
    opcheck(append_module._op, arguments)
