"""The search: costs as the whole model shows them, allocations as brute force finds them, recipes that load."""

import errno
import importlib.metadata
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import linear

import diffquant
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids

pytest.importorskip("scipy")

from diffquant.calib.search import search as search_module
from diffquant.calib.search.allocation import Budget, allocate, average_bits, spread_evenly
from diffquant.calib.search.outputs import search_table, write_search
from diffquant.calib.search.result import group_by_kind, interpolate_uniform_kl, read_searches
from diffquant.calib.search.search import Search
from diffquant.calib.search.sensitivity import OneDnnProducts, Sensitivity
from diffquant.calib.search.units import Unit, find_unassigned_units, find_units, quantize_unit, to_recipe
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import load_text
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.checkpoints.tokens import encode_windows
from diffquant.errors import CheckpointError, GroupSizeError, UsageError
from diffquant.measure.scoring import next_token_kl
from diffquant.model.cache import PackedCache
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.reports import page
from diffquant.support.outputs import Journal
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

WIDTHS = (8, 6, 4)
OPTIONS = {"targets": ("weights", "k", "v", "logits"), "granularity": "g16", "windows": 2, "window": 48}
OPTIONS["check_characters"] = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # What a float32 checkpoint leaves unpacked is stored in bfloat16, which no unit's cost counts: here it is exact.
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "diff-v2", dtype=torch.bfloat16)


def toy(sizes, target="weights"):
    fixed = {"target": target, "kind": "x", "granularity": "row"}
    stored = [{b: size * b // 8 + size // 32 for b in WIDTHS} for size in sizes]
    return [Unit(name=f"u{i}", layer=i, elements=size, stored=stored[i], **fixed) for i, size in enumerate(sizes)]


@given(st.integers(0, 10**6), st.sampled_from([4.25, 4.75, 5.5, 6.25, 8.25]))
@example(183_617, 8.25)  # the last unit's cost differs by less than a millionth of the largest
def test_the_allocation_is_what_brute_force_finds(seed, budget):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (5,), generator=generator).mul(64).tolist()
    units = toy(sizes[:3]) + toy(sizes[3:], "k")
    drops = torch.rand(5, generator=generator).mul(-12).exp().tolist()
    costs = {u: {4: d, 6: d / 20, 8: d / 400} for u, d in zip(units, drops, strict=True)}
    found = allocate(costs, Budget(bits=budget))

    def fits(choice):
        return all(average_bits(dict(zip(units, choice, strict=True)), t) <= budget + 1e-9 for t in ("weights", "k"))

    best = min(
        sum(costs[u][b] for u, b in zip(units, choice, strict=True))
        for choice in itertools.product(WIDTHS, repeat=5)
        if fits(choice)
    )
    assert fits([found[unit] for unit in units])
    assert sum(costs[u][b] for u, b in found.items()) == pytest.approx(best, rel=1e-6)


def test_a_budget_in_bytes_counts_what_is_stored():
    units = toy([64, 640, 128])
    costs = {u: {4: 1.0, 6: 0.1, 8: 0.0} for u in units}
    limit = sum(u.stored[4] for u in units) + 33
    found = allocate(costs, Budget(nbytes=limit))
    assert sum(u.stored[b] for u, b in found.items()) <= limit
    choices = [dict(zip(units, choice, strict=True)) for choice in itertools.product(WIDTHS, repeat=3)]
    fitting = [choice for choice in choices if sum(u.stored[b] for u, b in choice.items()) <= limit]
    assert sum(costs[u][found[u]] for u in units) == min(sum(costs[u][c[u]] for u in units) for c in fitting)


@in_one_test("budget", [4.25, 4.75, 5.75, 7.35, 8.25])
def test_an_even_spread_keeps_to_the_budget_and_uses_it(budget):
    units = toy([64] * 40)
    spread = spread_evenly(units, WIDTHS, Budget(bits=budget))
    assert budget - 0.06 < average_bits(spread, "weights") <= budget
    assert len(set(spread.values())) <= 2


def units_of(path, targets, granularity="g16"):
    return find_units(open_source(path), targets, granularity)


def check_costs(folder, units, length, tokens, width=4):
    """Check that each unit costs what the whole model under its recipe shows."""
    model = load(folder, dtype=torch.float32)
    ids = encode_windows(model, load_tokenizer(folder), load_text(), length, tokens)
    exact = model(ids).logits.flatten(0, 1)
    sensitivity = Sensitivity(model, ids)
    costs = {unit: sensitivity.measure_cost(unit, width) for unit in units}
    for unit, cost in costs.items():
        recipe = Recipe.from_dict({"overrides": {unit.name: str(unit.scheme(width))}})
        changed = load(folder, recipe, torch.float32)(ids).logits.flatten(0, 1)
        expected = float(next_token_kl(exact, changed).double().mean())
        assert cost == pytest.approx(expected, rel=1e-3, abs=1e-6 if length == 24 else 1e-7)
    torch.testing.assert_close(model(ids).logits.flatten(0, 1), exact)
    assert model.recipe == Recipe()


@in_one_test(
    ("target", "width"),
    [*((target, 4) for target in ("weights", "k", "v", "logits")), ("weights", "nvfp4"), ("logits", "e4m3")],
)
def test_a_cost_is_what_the_whole_model_under_that_recipe_shows(checkpoint, target, width):
    units = units_of(checkpoint, (target,))[:: 5 if target == "weights" else 1]
    check_costs(checkpoint, units, 48, 144, width)


def test_the_text_that_widths_are_chosen_on_is_not_the_one_they_are_compared_on(checkpoint, tmp_path, monkeypatch):
    words = load_text()[:6000]
    (tmp_path / "text.txt").write_text(words)
    read = set()

    def watch(name, place):
        whole = getattr(search_module, name)
        watched = lambda *given, **more: read.add((name, given[place])) or whole(*given, **more)  # noqa: E731
        monkeypatch.setattr(search_module, name, watched)

    watch("encode_windows", 2)
    watch("compute_perplexity", 1)
    options = OPTIONS | {"targets": ("v",), "text": tmp_path / "text.txt"}
    Search(checkpoint, Budget.parse("7"), tmp_path / "out", **options).run()
    assert read == {("encode_windows", words[:3000]), ("compute_perplexity", words[3000:3600])}


def test_a_search_whose_disk_was_full_after_its_first_file_is_written_again(checkpoint, tmp_path, monkeypatch):
    found = Search(checkpoint, Budget.parse("7"), tmp_path / "out", **OPTIONS | {"targets": ("v",)}).run()
    write, written = page.write_atomically, []

    def write_one(file, text):
        if written:
            raise OSError(errno.ENOSPC, "no space")
        written.append(file)
        write(file, text)

    with monkeypatch.context() as disk:
        disk.setattr(page, "write_atomically", write_one)
        with pytest.raises(OSError, match="no space"):
            write_search(found, tmp_path / "out")
    assert len(write_search(found, tmp_path / "out")) == 5


def test_a_search_beats_an_even_spread_resumes_and_its_recipe_quantizes(checkpoint, tmp_path):
    # Weights in groups of 16 have a bit of scales each, K and V of 8 entries two bits.
    search = Search(checkpoint, Budget.parse("6.6"), tmp_path / "out", **OPTIONS)
    assert len(search.missing_measurements) == 20 * 3
    calls = []
    found = search.run(lambda done, total, what: calls.append((done, total)))
    assert (60, 60) in calls
    by_name = {c.name: c for c in found.candidates}
    assert by_name["searched"].kl < by_name["spread evenly"].kl
    assert by_name["searched"].kl < (interpolate_uniform_kl(found) or by_name["uniform 4"].kl)
    assert all(bits <= 6.6 + 1e-9 for bits in found.candidates[0].bits.values())
    assert not Search(checkpoint, Budget.parse("6.6"), tmp_path / "out", **OPTIONS).missing_measurements
    recipe_file, data, *pictures, report = write_search(found, tmp_path / "out")
    assert Recipe.read(recipe_file) == found.recipe
    assert json.loads(data.read_text())["candidates"][0]["name"] == "searched"
    assert [picture.read_bytes()[:4] for picture in pictures] == [b"\x89PNG"] * 2
    assert "<svg" in report.read_text()
    assert "spread evenly" in search_table(found)
    quantize(checkpoint, tmp_path / "low", Recipe.read(recipe_file))
    model = load(tmp_path / "low")
    assert model.recipe.at_layer(0).k == found.recipe.at_layer(0).k
    model(torch.arange(20)[None])
    model.check_quantizers_ran()


@in_one_test("budget", ["5.2", "5.9", "7"])
def test_the_file_of_a_searched_recipe_keeps_to_the_budget_scales_included(checkpoint, tmp_path, budget):
    units = units_of(checkpoint, ("weights",))
    costs = {u: {b: (u.layer + 1) / 4**b for b in WIDTHS} for u in units}
    chosen = allocate(costs, Budget.parse(budget))
    report = quantize(checkpoint, tmp_path / "low", to_recipe(chosen))
    assert report.packed_bits == pytest.approx(average_bits(chosen, "weights"))
    assert float(budget) - 0.5 < report.packed_bits <= float(budget)


@in_one_test("target", ["k", "v"])
def test_the_stored_bits_of_a_cache_are_those_its_tensors_take(checkpoint, target):
    unit = units_of(checkpoint, (target,))[0]
    model = load(checkpoint, Recipe.of(**{target: 6}), torch.bfloat16)
    cache = PackedCache(model.recipe, 2, {})
    heads = model.config.diff_spec.kv_pairs
    states = torch.zeros(1, heads, 50, unit.elements // heads, dtype=torch.bfloat16)
    cache.update(states, states, 0)
    side = cache.layers[0].stored_keys if target == "k" else cache.layers[0].stored_values
    assert unit.stored[6] * 50 == sum(x.nbytes for x in (side.words, side.scales))


def test_a_killed_run_keeps_every_whole_line(tmp_path):
    journal = Journal(tmp_path, {"a": 1})
    journal.add("x", {"kl": 0.5})
    with journal.path.open("a") as file:
        file.write('{"name": "y", "resu')
    again = Journal(tmp_path, {"a": 1})
    assert again.get("x") == {"kl": 0.5}
    assert again.get("y") is None
    again.add("y", 2)
    assert Journal(tmp_path, {"a": 1}).get("y") == 2
    assert Journal(tmp_path, {"a": 2}).get("x") is None


@in_one_test(
    "damage",
    [
        lambda line: line.replace(b"0.25", b"0.35"),
        lambda line: line.replace(b"kl", b"lk"),
        lambda _: b"[" * 100_000,
        lambda _: b"\xff\xfe\x00",
        lambda _: b"[]",
        lambda line: line[:20],
    ],
)
def test_a_damaged_line_of_a_journal_costs_itself_alone(tmp_path, damage):
    journal = Journal(tmp_path, {"a": 1})
    for name, kl in (("x", 0.5), ("y", 0.25), ("z", 0.125)):
        journal.add(name, {"kl": kl})
    lines = journal.path.read_bytes().split(b"\n")
    lines[2] = damage(lines[2])
    journal.path.write_bytes(b"\n".join(lines))
    again = Journal(tmp_path, {"a": 1})
    assert [again.get(name) for name in "xyz"] == [{"kl": 0.5}, None, {"kl": 0.125}]
    again.add("y", {"kl": 0.25})
    assert [Journal(tmp_path, {"a": 1}).get(name) for name in "xyz"] == [{"kl": 0.5}, {"kl": 0.25}, {"kl": 0.125}]


def test_a_journal_of_another_device_or_transformers_is_not_taken(checkpoint, tmp_path, monkeypatch):
    def search(device="cpu"):
        return Search(checkpoint, Budget.parse("6.6"), tmp_path, **OPTIONS | {"device": device})

    first = search()
    first.journal.add(f"{first.units[0].name} {first.units[0].scheme(4)}", 0.5)
    assert len(search().missing_measurements) == 60 - 1
    # "meta" stands for any other device: nothing runs.
    assert len(search("meta").missing_measurements) == 60
    installed = importlib.metadata.version
    others = {"transformers": "0.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: others.get(name) or installed(name))
    assert len(search().missing_measurements) == 60


@in_one_test("bias", [True, False])
def test_onednn_products_are_linear_to_float32(bias):
    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(shape, generator=generator) for shape in ((3, 37, 51), (29, 51), (29,)))
    offset = offset if bias else None
    exact = linear(x.double(), weight.double(), None if offset is None else offset.double())
    with torch.inference_mode(), OneDnnProducts():
        torch.testing.assert_close(linear(x, weight, offset).double(), exact, rtol=0, atol=1e-4)
        assert linear(x.double(), weight.double()).dtype == torch.float64
        # No bias is nothing that oneDNN would refuse.
        torch.testing.assert_close(linear(x.double(), weight.double(), None), x.double() @ weight.double().T)
        assert linear(x[:0], weight).shape == (0, 37, 29)
    with torch.enable_grad(), OneDnnProducts():
        assert linear(x, weight.clone().requires_grad_()).requires_grad


def test_an_interrupted_search_says_what_it_keeps(checkpoint, tmp_path):
    def interrupt(done, total, what):
        if done == 7:
            raise KeyboardInterrupt

    search = Search(checkpoint, Budget.parse("6.6"), tmp_path, **OPTIONS)
    with pytest.raises(KeyboardInterrupt, match=r"7 measurements are kept.*run the same command"):
        search.run(interrupt)
    assert len(Search(checkpoint, Budget.parse("6.6"), tmp_path, **OPTIONS).missing_measurements) == 60 - 7


@in_one_test(
    ("budget", "changes", "error", "message"),
    [
        ("3.9", {}, UsageError, "below the narrowest width: weights at 4 bits"),
        ("1kB", {"targets": ("weights",)}, UsageError, "below the narrowest width"),
        ("5", {"targets": ("weights",)}, UsageError, r"weights at 4 bits take 5\.\d\d stored bits each, scales inc"),
        ("11", {}, UsageError, "allows everything at 8 bits, the widest"),
        ("90MB", {}, UsageError, "bytes is for weights"),
        ("4.5", {"granularity": "g32"}, GroupSizeError, "group size 32 does not divide"),
        ("4.5", {"targets": ("weight",)}, UsageError, "unknown target 'weight'"),
        ("4.5", {"device": "cuda:99"}, UsageError, "device"),
        ("6.6", {"window": 4096}, UsageError, "window 4096 must be between"),
    ],
)
def test_what_cannot_be_searched_is_refused(checkpoint, tmp_path, budget, changes, error, message):
    with pytest.raises(error, match=message):
        Search(checkpoint, Budget.parse(budget), tmp_path / "out", **OPTIONS | changes).run()


@in_one_test("widths", [(4,), ("16", "4"), ("nvfp4",), ("nvfp4", 9), ("fp4", "nvfp4")])
def test_what_is_no_choice_of_widths_is_refused(widths):
    with pytest.raises(UsageError, match=r"two or more widths|unknown number format .fp4."):
        Search("nowhere", Budget(bits=6.0), Path(), widths=widths)


FLOATS = OPTIONS | {"widths": ("nvfp4", "e4m3", 6)}


@thorough
def test_a_search_among_floats_beats_an_even_spread_and_its_recipe_quantizes(checkpoint, tmp_path):
    options = FLOATS | {"targets": ("weights",), "widths": ("nvfp4", "e4m3")}
    search = Search(checkpoint, Budget.parse("5.5"), tmp_path / "out", **options)
    # Sizes of integers, whose groups may not divide what blocks of floats do, are not asked for.
    assert {width for unit in search.units for width in unit.stored} == {"nvfp4", "e4m3"}
    found = search.run()
    assert found.widths == ["e4m3", "nvfp4"]
    by_name = {c.name: c for c in found.candidates}
    assert by_name.keys() == {"searched", "spread evenly", "uniform nvfp4", "uniform e4m3"}
    assert by_name["searched"].kl < by_name["spread evenly"].kl
    recipe_file, *_ = write_search(found, tmp_path / "out")
    report = quantize(checkpoint, tmp_path / "low", Recipe.read(recipe_file))
    assert 5 < report.packed_bits <= 5.5
    chosen = {unit.name: unit.chosen for unit in found.measurements}
    packed = {name: scheme.format.name for name, scheme in open_source(tmp_path / "low").packed.items()}
    assert packed == chosen
    assert {"nvfp4", "e4m3"} == set(chosen.values())
    assert read_searches(tmp_path / "out")[0] == found


def test_floats_and_integers_are_chosen_among_for_caches_and_logits_too(tmp_path):
    narrow = write_checkpoint(tmp_path / "llama", "llama", vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(narrow)
    options = FLOATS | {"targets": ("k", "v", "logits")}
    search = Search(narrow, Budget.parse("6.5"), tmp_path / "out", **options)
    assert search.widths == ["e4m3", 6, "nvfp4"]
    found = search.run()
    assert [c.name for c in found.candidates][:2] == ["searched", "spread evenly"]
    assert all(bits <= 6.5 + 1e-9 for bits in found.candidates[0].bits.values())
    model = load(narrow, found.recipe)
    model(torch.arange(20)[None])
    model.check_quantizers_ran()


# Whether each map has its own keys, how many signal heads share a noise head, and what stays unless it is named.
FAMILY = {
    "diffllama": (True, 1, set()),
    "unilm-v1": (True, 1, set()),
    "unilm-v2": (False, 1, {"lambda_proj"}),
    "motif": (True, 1, set()),
    "motif-grouped": (True, 4, set()),
    "gated": (False, 2, {"lambda_proj", "output_gate_proj"}),
    "llama": (False, 0, set()),
}


@in_one_test("name", FAMILY)
def test_parts_are_the_rows_of_each_maps_heads_and_what_stays_at_16_bits(tmp_path, name):
    own_keys, signals, kept = FAMILY[name]
    source = open_source(write_checkpoint(tmp_path / "model", name))
    parts = find_unassigned_units(source, "row", [8])
    maps = [projection for projection, is_one in (("q_proj", signals), ("k_proj", own_keys)) if is_one]
    assert {part.kind for part in parts} == {
        *(f"self_attn.{projection}, {of_map}" for projection in maps for of_map in ("signal", "noise")),
        *(f"self_attn.{module}" for module in kept),
    }
    model, ids = load(source, dtype=torch.float32), random_ids()
    layout, exact = source.spec.layout, projected(model, ids)
    for part in [each for each in parts if each.layer == 0 and each.rows is not None]:
        with quantize_unit(model, part, 2):
            rounded = projected(model, ids)
        projection = part.kind.split(".")[1].split(",")[0]
        heads = (layout.view_queries if projection == "q_proj" else layout.view_keys)(
            rounded[projection] - exact[projection]
        )
        of_signal = layout.pairs if projection == "q_proj" else layout.kv_pairs
        moved = heads.abs().amax((0, 2, 3)) > 0
        assert moved[:of_signal].all() == part.kind.endswith("signal") == (not moved[of_signal:].any())
        assert moved[of_signal:].all() == part.kind.endswith("noise")
    for projection in maps:
        of_maps = [part for part in parts if part.layer == 0 and projection in part.kind]
        rows = torch.cat([part.rows for part in of_maps])
        assert rows.sort().values.tolist() == list(range(layout.row_count(projection)))
        if projection == "q_proj":
            assert of_maps[0].elements == signals * of_maps[1].elements


def projected(model, ids):
    """What the first layer projects to queries and to keys."""
    seen, attention = {}, model.model.layers[0].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _m, _x, y, name=name: seen.update({name: y}))
        for name in ("q_proj", "k_proj")
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", sampled(["motif-grouped", "gated"], 2))
def test_roles_tell_what_each_map_and_what_stays_pays_for_its_bits(tmp_path, name):
    folder = write_checkpoint(tmp_path / "model", name, torch.bfloat16, vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(folder)
    settings = {"windows": 1, "window": 32, "characters": 200, "granularity": "row", "bits": "8,6", "roles": True}
    found = diffquant.search(folder, tmp_path / "out", 7.5, **settings)
    assert read_searches(tmp_path / "out")[0] == found
    plain = diffquant.search(folder, tmp_path / "plain", 7.5, **settings | {"roles": False})
    # Parts cost time, and change no choice.
    assert [unit.chosen for unit in plain.measurements] == [unit.chosen for unit in found.measurements]
    assert (plain.parts, {part.chosen for part in found.parts}) == (None, {None})
    kinds = {kind: units for (kind, _), units in group_by_kind(found).items()}
    parts = {part.kind for part in found.parts}
    assert {"self_attn.q_proj, signal", "self_attn.q_proj, noise"} < parts < kinds.keys()
    by_map = [unit for of_map in ("signal", "noise") for unit in kinds[f"self_attn.q_proj, {of_map}"]]
    assert sum(unit.elements for unit in kinds["self_attn.q_proj"]) == sum(unit.elements for unit in by_map)
    assert "self_attn.q_proj, noise" in search_table(found)
    assert "self_attn.q_proj, noise" not in search_table(plain)


# Models with layers of their own, in sizes that scales of rows do not outweigh.
OTHERS = {
    "motif3": {
        **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
        **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32),
    },
    "phi4flash": {},
}


def write_other(folder, name):
    write_checkpoint(folder, name, torch.bfloat16, vocab_size=tiny_lm.WORDS, **OTHERS[name])
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", sampled(OTHERS, 2))
def test_a_cost_in_layers_of_other_kinds_is_what_the_whole_model_shows(tmp_path, name):
    folder = write_other(tmp_path / "model", name)
    units = [*units_of(folder, ("weights",), "row")[::4], *units_of(folder, ("k", "v", "logits"))]
    layers = open_source(folder).architecture.target_layers
    assert {u.layer for u in units if u.target == "k"} == set(layers["k"])
    assert {u.layer for u in units if u.target == "logits"} == set(layers["logits"])
    check_costs(folder, units, 24, 48)


def test_a_role_that_groups_do_not_divide_is_named_before_anything_is_measured(tmp_path):
    folder = write_other(tmp_path / "model", "phi4flash")
    with pytest.raises(GroupSizeError, match=r"3 tensors, such as model\.layers\.0\.attn\.dt_proj\.weight \[128, 4\]"):
        diffquant.search(folder, tmp_path / "out", 5, window=24, characters=200, granularity="g16", roles=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sampled(OTHERS, 2))
def test_models_of_other_layers_are_searched_and_experts_told_apart_by_layer(tmp_path, name):
    folder = write_other(tmp_path / "model", name)
    settings = {"windows": 1, "window": 24, "characters": 200, "granularity": "row", "bits": "8,6", "roles": True}
    found = diffquant.search(folder, tmp_path / "out", 7.7, **settings)
    quantize(folder, tmp_path / "low", found.recipe)
    assert open_source(tmp_path / "low").packed
    told = {kind: units for (kind, _), units in group_by_kind(found).items()}
    if name == "phi4flash":
        assert {"attn.Wqkv", "attn.x_proj", "attn.dt_proj", "mlp.fc1"} < told.keys()
        return
    assert {"self_attn.wq_b, signal", "self_attn.wq_b, noise", "moe.router.gate", "self_attn.wq_b_gate"} < told.keys()
    for kind in ("moe.experts.gate_up_proj", "moe.experts.down_proj"):
        assert [unit for layer in range(1, 5) for unit in told[f"{kind}, layer {layer}"]] == told[kind]
    assert "moe.experts.down_proj, layer 3" in search_table(found)


def test_a_checkpoint_that_is_replaced_during_a_search_ends_it_and_is_not_recorded(tmp_path):
    model = tiny_lm.write_llama(tmp_path / "model")
    search = Search(model, Budget.parse("6.6"), tmp_path / "out", **OPTIONS)
    told = []

    def replace_it(*progress):
        told.append(progress)
        if len(told) == 3:
            tiny_lm.write_llama(tmp_path / "other", seed=5)
            shutil.copy(tmp_path / "other" / "model.safetensors", model)

    with pytest.raises(CheckpointError, match="changed while"):
        search.run(replace_it)
    assert len(Journal(tmp_path / "out", search._key)) == 3
