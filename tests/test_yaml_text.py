"""YAML that recipes are written in: what is read, and what is refused."""

import pytest

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.support.yaml_text import parse_yaml
from tests.support.tables import in_one_test


@in_one_test(
    ("text", "value"),
    [
        ("weights: 4", {"weights": 4}),
        ("weights: 4:g32", {"weights": "4:g32"}),
        # YAML 1.1 would make 270 of it.
        ("weights: 4:30", {"weights": "4:30"}),
        ("residual: -3", {"residual": -3}),
        ("a: [1, 2.5, true, null]", {"a": [1, 2.5, True, None]}),
    ],
)
def test_values_are_what_they_look_like(text, value):
    assert parse_yaml(text) == value


@in_one_test(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "aliases"),
        ("weights: 4\nweights: 8", "'weights' given twice"),
        ("[" * 5000, "nested too deeply"),
        ("a: ]", "expected"),
    ],
)
def test_what_is_ambiguous_or_endless_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


ODD = ["weights: ٤", "weights: 4:g٣٢", "weights: true", "weights: [4]", f"weights: {'9' * 5000}"]
ODD += [f"weights: 4:g{'9' * 5000}", "residual: true", "overrides: {3: 8}", "overrides: {null: 8}"]


@in_one_test("text", [*ODD, "overrides: {'*': {a: b}}"])
def test_a_recipe_of_odd_values_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UsageError) as refused:
        Recipe.read(tmp_path / "recipe.yaml")
    assert len(str(refused.value)) < 500
