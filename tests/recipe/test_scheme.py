import pickle
import re
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import TRANSFORMS, Scheme, Transform
from diffquant.recipe.targets import LAYER_TARGETS
from tests.support.tables import in_one_test

NAMES = ["tensor", "map", "head", "pair", "row", "column", "g32", "g128", "c64", "b64"]
GRANULARITIES = [*NAMES, *(f"{name}:shift" for name in NAMES), "tensor:alike", "head:alike", "row:alike"]


@given(st.integers(2, 8), st.sampled_from(GRANULARITIES))
def test_text_form_makes_the_round_trip(bits, granularity):
    text = f"{bits}:{granularity}"
    assert str(Scheme.parse(text)) == text
    assert Scheme.parse(str(Scheme.parse(text))) == Scheme.parse(text)


@in_one_test("text", ["", "x", "4:", "4:gg", "4:g0", "9", "1", "16:row", "4:row:row", "4:row:shift:shift", "-4"])
def test_malformed_text_is_refused(text):
    with pytest.raises(UsageError):
        Scheme.parse(text)


def test_rows_have_the_name_that_they_have_in_each_target_and_are_stored_as_before():
    recipe = Recipe.of(weights="8:channel", kv="4:token", logits="6:token:shift", overrides={"*.3.*.k": "8:token"})
    assert recipe == Recipe.of(weights="8:row", kv="4:row", logits="6:row:shift", overrides={"*.3.*.k": "8:row"})
    assert recipe.to_dict()["k"] == "4:row"
    assert recipe.to_dict()["weights"] == "8:row"


@in_one_test(
    ("entries", "said"),
    [
        ({"kv": "4:channel"}, "for keys write c32, a scale per channel over 32 tokens, and for values token"),
        ({"v": "4:channel:rotated"}, "for keys write c32"),
        ({"overrides": {"*.k": "4:channel"}}, "for keys write c32"),
        ({"logits": "4:channel"}, "logits has no scale per channel; write token"),
        ({"weights": "4:token"}, "weights has no scale per token; write channel"),
    ],
)
def test_the_rows_of_another_target_are_refused_with_what_to_write(entries, said):
    with pytest.raises(UsageError, match=said):
        Recipe.from_dict(entries)


def test_a_scheme_by_itself_has_rows_alone():
    with pytest.raises(UsageError, match="a scheme without a target has no scale per channel; write row"):
        Scheme.parse("4:channel")


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(UsageError, match=r"unknown recipe key 'wieghts'; did you mean 'weights'"):
        Recipe.from_dict({"wieghts": "4:g32"})


@in_one_test(
    "entries",
    [{"weights": "4:head"}, {"k": "4:pair"}, {"v": "4:map"}, {"v": "4:c64"}, {"logits": "4:c64"}, {"k": "4:column"}],
)
def test_a_granularity_a_target_cannot_have_is_refused(entries):
    with pytest.raises(UsageError):
        Recipe.from_dict(entries)


def test_a_recipe_makes_the_round_trip_through_yaml(tmp_path):
    recipe = Recipe.of(
        weights="4:g32", k="4:c64", v="6", logits="6:pair:shift", residual=64, overrides={"*.mlp.*": "8:row"}
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    assert Recipe.read(path) == recipe


@in_one_test(
    ("text", "fault"),
    [
        ("- 4", "must be a mapping of weights, k, v, logits"),
        ("weights: [", "line 1: expected the node content"),
        ("residual: many", "residual must be a number of tokens, got 'many'"),
        ("overrides: 4", "overrides must map name patterns to schemes, got 4"),
        ("residual: -1", "residual must be 0 or more tokens, got -1"),
        ("residual: 64", "residual 64 keeps the newest tokens of a quantized cache: quantize kv, too"),
    ],
)
def test_a_malformed_recipe_file_is_refused_by_name(tmp_path, text, fault):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"recipe {re.escape(str(path))}:? .*{fault}"):
        Recipe.read(path)


@in_one_test("residual", [2.5, "3", True, None])
def test_a_residual_is_a_number_of_tokens_wherever_a_recipe_comes_from(residual):
    for make in (lambda: Recipe.of(kv=8, residual=residual), lambda: Recipe.from_dict({"residual": residual})):
        with pytest.raises(UsageError, match=re.escape(f"residual must be a number of tokens, got {residual!r}")):
            make()


def test_the_first_matching_override_wins():
    recipe = Recipe.of(weights="4:g32", overrides={"*.q_proj": "8:row", "*.self_attn.*": "6:row"})
    assert str(recipe.weight_scheme("model.layers.0.self_attn.q_proj")) == "8:row"
    assert str(recipe.weight_scheme("model.layers.0.self_attn.v_proj")) == "6:row"
    assert str(recipe.weight_scheme("model.layers.0.mlp.up_proj")) == "4:g32"


def test_a_recipe_that_rounds_to_the_nearest_is_written_as_without_a_rounding():
    """Cells and checkpoints that were made before recipes had one are known by this text."""
    text = "weights: 4:g32\nk: '16'\nv: '16'\nlogits: '16'\nresidual: 0\noverrides: {}\n"
    assert Recipe.of(weights="4:g32").to_yaml() == text
    assert Recipe.of(weights="4:g32", rounding={"name": "nearest"}).to_yaml() == text


def test_a_recipe_takes_over_the_rounding_with_the_weights():
    other = Recipe.of(weights="4:g32", rounding="mse")
    assert Recipe.of(kv=8).with_weights_of(other) == Recipe.of(weights="4:g32", kv=8, rounding="mse")


@in_one_test(
    ("entry", "message"),
    [
        ({"name": "gptq", "token": 64}, r"unknown rounding key 'token'; did you mean 'tokens'"),
        ({"text": "books.txt"}, "must be a name or a mapping"),
        ([4], "must be a name or a mapping"),
        ({"name": "gptq", "tokens": "many"}, "tokens must be a whole number"),
        ({"name": "gptq", "window": 1}, "window must be a whole number, 2 or more"),
        ({"name": "gptq", "text": 4}, "text must be the name of a file"),
    ],
)
def test_a_malformed_rounding_is_refused(entry, message):
    with pytest.raises(UsageError, match=message):
        Recipe.from_dict({"weights": "4:g32", "rounding": entry})


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"kv": "4:row:shift"}, "k: shift is for logits, .*; leave it out"),
        ({"weights": "4:g32:alike"}, "weights: alike is for logits, .*; leave it out"),
        ({"logits": "4:pair:alike"}, "logits: alike and pair cannot be combined in 4:pair:alike; leave out one"),
        ({"logits": "4:static:shift"}, "logits: shift and static cannot be combined in .*; leave out one"),
        ({"logits": "e4m3:row:shift"}, "logits: shift and uneven levels cannot be combined in e4m3:row:shift"),
        ({"overrides": {"*.3.*.p": "4:g16:pow2"}}, r"override '\*.3.\*.p': pow2 and group cannot be combined in"),
        ({"logits": "4:row:smoth"}, r"logits: cannot read .* FORMAT\[:GRANULARITY\]\[:shift\]\[:alike\], such as"),
        ({"overrides": {"k": "4:head"}, "k": "4:row"}, "override 'k' cannot be quantized per head"),
    ],
    ids=str,
)
def test_a_transform_that_cannot_be_names_itself_the_target_and_what_to_do(entries, said):
    with pytest.raises(UsageError, match=said):
        Recipe.from_dict(entries)


def test_every_pair_of_transforms_is_read_in_any_order_or_refused():
    for target, (first, second) in product(LAYER_TARGETS, permutations(TRANSFORMS.values(), 2)):
        text, served = f"4:row:{first.name}:{second.name}", target in set(first.targets) & set(second.targets)
        if served and not {first.name, second.name} & {*first.excludes, *second.excludes}:
            scheme = getattr(Recipe.of(**{target: text}), target)
            assert set(scheme.transforms) == {first, second}
            assert scheme == Scheme.parse(f"4:row:{second.name}:{first.name}") == Scheme.parse(str(scheme))
        else:
            with pytest.raises(UsageError, match=f"{first.name}|{second.name}"):
                Recipe.of(**{target: text})


def test_a_new_transform_is_one_object(monkeypatch):
    clip = Transform("clip", ("p",), "whose largest value is known", ("pow2",), reads="tile")
    monkeypatch.setitem(TRANSFORMS, "clip", clip)
    recipe = Recipe.of(p="8:g16:clip:fullsum")
    assert str(recipe.p) == "8:g16:fullsum:clip"
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert not recipe.p.is_token_local
    for entries, said in (
        ({"logits": "8:row:clip"}, "logits: clip is for p, whose largest value is known; leave it out"),
        ({"p": "8:row:clip:pow2"}, "p: clip and pow2 cannot be combined in 8:row:pow2:clip; leave out one"),
        ({"p": "7:clip:clip"}, r"\[:pow2\]\[:fullsum\]\[:clip\]"),
    ):
        with pytest.raises(UsageError, match=said):
            Recipe.of(**entries)
