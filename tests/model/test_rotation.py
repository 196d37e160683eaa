"""Keys and values of the cache rotated before they are rounded: the same function, and less lost of what sticks out."""

import math

import pytest
import torch
from scipy.linalg import hadamard

from diffquant import Recipe, load, quantize
from diffquant.errors import UsageError
from diffquant.model.walk import CAUSAL
from diffquant.recipe.numbers.simulation import make_rotation_matrix
from tests.support.checkpoints import SOURCES, write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test

# More newest tokens than any text here has: nothing is rounded, and only the rotation is left.
ALL = 1000


@pytest.fixture(scope="module", params=SOURCES)
def source(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("rotated") / "model", request.param)


@in_one_test("width", [1, 2, 12, 32, 48, 128])
def test_a_rotation_is_orthogonal_and_hadamards_where_there_is_one(width):
    matrix = make_rotation_matrix(width)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-14)
    if width & (width - 1) == 0:
        theirs = torch.from_numpy(hadamard(width)).double() / math.sqrt(width)
        signs = (matrix * theirs).sum(1, keepdim=True).sign()
        torch.testing.assert_close(matrix, signs * theirs, rtol=0, atol=1e-15)


@pytest.mark.parametrize("rotated_target", ["k", "v", "kv"])
def test_the_function_is_the_same_in_float64(source, rotated_target):
    model, ids = load(source).double(), random_ids(length=19)
    exact = model(ids).logits
    scheme = "4:row:rotated"
    given = {target: scheme if target in rotated_target else "4:row" for target in ("k", "v")}
    model.apply_recipe(Recipe.of(**given, residual=ALL))
    assert (model.attention_modules[1].key_rotation is not None) == ("k" in rotated_target)
    # The model's norms compute in float32.
    torch.testing.assert_close(model(ids).logits, exact, rtol=0, atol=2e-5)


def test_attention_without_a_norm_is_the_same_to_float64s_last_digits(tmp_path):
    model = load(write_checkpoint(tmp_path / "v2", "unilm-v2")).double()
    attention, x = model.attention_modules[0], torch.randn(2, 9, model.config.hidden_size, dtype=torch.float64)
    walk = model.new_layer_runner(9)
    rotary = tuple(table.double() for table in walk.layer_arguments(walk.layers[0])[0])
    exact = attention(x, rotary, CAUSAL, None)
    model.apply_recipe(Recipe.of(kv="4:row:rotated", residual=ALL))
    torch.testing.assert_close(attention(x, rotary, CAUSAL, None), exact, rtol=0, atol=1e-12)


def test_tokens_one_by_one_read_what_a_whole_text_reads(source):
    model, ids = load(source, dtype=torch.float32), random_ids(batch=1, length=16)
    model.apply_recipe(Recipe.of(kv="4:row:rotated"))
    cache = model.new_cache()
    steps = [model(token, past_key_values=cache).logits for token in ids.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, rtol=0, atol=1e-3)


def test_a_quantized_checkpoint_keeps_its_rotation(tmp_path):
    folder = write_checkpoint(tmp_path / "v1", "diffllama")
    recipe = Recipe.of(weights="8:row", k="4:c32:rotated", v="3:row:rotated")
    quantize(folder, tmp_path / "low", recipe)
    stored, simulated, ids = load(tmp_path / "low"), load(folder, recipe), random_ids()
    assert stored.recipe == recipe
    assert torch.equal(stored(ids).logits, simulated(ids).logits)
    unrotated = load(tmp_path / "low", Recipe.of(k="4:c32", v="3:row"))
    assert not torch.equal(unrotated(ids).logits, simulated(ids).logits)


@in_one_test(
    ("recipe", "message"),
    [
        ({"logits": "4:row:rotated"}, "rotated is for k and v"),
        ({"weights": "4:g32:rotated"}, "rotated is for k and v"),
        ({"kv": "8:static:rotated"}, "k: rotated and static cannot be combined in 8:static:rotated; leave out one"),
        ({"kv": "16:rotated"}, "16 bits means not quantized"),
    ],
)
def test_what_cannot_be_rotated_is_refused(recipe, message):
    with pytest.raises(UsageError, match=message):
        Recipe.of(**recipe)


def test_keys_that_other_layers_read_are_refused_before_weights_are_read(tmp_path):
    folder = write_checkpoint(tmp_path / "phi", "phi4flash")
    with pytest.raises(UsageError, match="read the keys and values of another layer"):
        load(folder, Recipe.of(kv="4:row:rotated"))
    with pytest.raises(UsageError, match="read the keys and values of another layer"):
        quantize(folder, tmp_path / "low", Recipe.of(kv="4:row:rotated"))
    model = load(folder)
    with pytest.raises(UsageError, match="read the keys and values of another layer"):
        model.apply_recipe(Recipe.of(kv="4:row:rotated"))
