"""Padding on any side and holes in exported graphs: each sequence's logits are those of its tokens alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from diffquant.errors import CheckpointError
from diffquant.onnx.runtime.session import OnnxModel
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

VOCABULARY = 90
# What tokenizers pad on the left, and on the right; holes, both ends, nothing, and a sequence that is all padding.
MASKS = {
    "left": [[1] * 7, [0] * 3 + [1] * 4, [0] * 6 + [1]],
    "right": [[1] * 7, [1] * 4 + [0] * 3, [1] + [0] * 6],
    "holes": [[1, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1, 1]],
    "left alone": [[0, 0, 1, 1, 1, 1, 1]],
    "an empty one": [[1] * 7, [0] * 7, [0] * 2 + [1] * 5],
}
STEPS = 3
FAMILIES = ["diffllama", "llama", "unilm-v1", "unilm-v2-half", "motif-grouped", "gated", "phi4flash", "motif3"]
FORMS = {
    "plain": {},
    "portable": {"portable": True},
    "cache of 8 bits": {"kv_bits": 8},
    "cache of 4 bits, portable": {"kv_bits": 4, "portable": True},
    "no cache": {"cache": False},
    "logits per token": {"logits": "8:row"},
    "logits per tensor": {"logits": "8:tensor"},
}


@pytest.fixture
def exported(made):
    """A function from a family and a form to its checkpoint and its exported folder."""
    return lambda family, form: made(family, **FORMS[form])


def batch_of(name):
    """Ids and mask [B, T + STEPS], of which the last columns count in every sequence."""
    mask = np.pad(np.array(MASKS[name], np.int64), ((0, 0), (0, STEPS)), constant_values=1)
    ids = np.random.default_rng(5).integers(3, VOCABULARY, mask.shape)
    return ids, mask


def calls(model, ids, mask, lengths):
    """Logits [B, sum, V] of calls that read so many columns each."""
    end, cache, parts = 0, model.allocate_cache(len(ids)), []
    for length in lengths:
        end += length
        (logits,), cache = model.run(ids[:, end - length : end], mask[:, :end], cache)
        parts.append(logits)
    return np.concatenate(parts, 1)


# Of Transformers no logits are rounded; of Motif-3's, codes fall otherwise in a batch without padding, too.
CASES = [
    (family, form)
    for family in FAMILIES
    for form in FORMS
    if "logits" not in FORMS[form] or family not in ("llama", "motif3")
]


@pytest.mark.parametrize(("family", "form"), sampled(CASES, 3))
def test_padding_on_any_side_changes_nothing(exported, family, form):
    _, folder = exported(family, form)
    for native in (True, False):
        model = OnnxModel(folder, 1, every_position=True, native=native)
        for name in MASKS:
            ids, mask = batch_of(name)
            first = mask.shape[1] - STEPS
            found = calls(model, ids, mask, [first, *[1] * STEPS] if model.cache else [mask.shape[1]])
            for row in range(len(ids)):
                kept = mask[row].astype(bool)
                tokens, before = ids[row : row + 1, kept], int(kept[:first].sum())
                lengths = [before or 1, *[1] * (STEPS if before else STEPS - 1)] if model.cache else [kept.sum()]
                wanted = calls(model, tokens, np.ones_like(tokens), lengths)
                np.testing.assert_allclose(found[row, kept], wanted[0], rtol=0, atol=2e-4, err_msg=f"{name}, {row}")


@pytest.mark.parametrize("form", ["plain", "portable", "no cache"])
@pytest.mark.parametrize("family", ["diffllama", "llama"])
@pytest.mark.parametrize("name", ["left", "right", "left alone"])
def test_logits_equal_transformers_under_the_same_mask(exported, family, form, name):
    checkpoint, folder = exported(family, form)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids, mask = batch_of(name)
    # As generate() counts them.
    positions = np.clip(mask.cumsum(1) - 1, 0, None)
    with torch.no_grad():
        wanted = oracle(*map(torch.from_numpy, (ids, mask)), position_ids=torch.from_numpy(positions)).logits.numpy()
    model = OnnxModel(folder, 1, every_position=True)
    found = calls(model, ids, mask, [mask.shape[1] - STEPS, *[1] * STEPS] if model.cache else [mask.shape[1]])
    kept = mask.astype(bool)
    np.testing.assert_allclose(found[kept], wanted[kept], rtol=0, atol=1e-4)


@in_one_test("form", ["plain", "portable", "cache of 8 bits"])
def test_the_folder_as_it_is_gives_the_last_tokens_logits(exported, form):
    _, folder = exported("unilm-v2-half", form)
    every, last = OnnxModel(folder, 1, every_position=True), OnnxModel(folder, 1)
    for name in MASKS:
        ids, mask = batch_of(name)
        first = mask.shape[1] - STEPS
        whole = calls(every, ids, mask, [first, *[1] * STEPS])
        found = calls(last, ids, mask, [first, *[1] * STEPS])
        for row in range(len(ids)):
            if mask[row, :first].any():
                end = first - 1 - mask[row, :first][::-1].argmax()
                np.testing.assert_array_equal(found[row, 0], whole[row, end])
            np.testing.assert_array_equal(found[row, 1:], whole[row, first:])


def test_a_folder_without_a_cache_gives_the_logits_of_every_position(exported):
    (logits,), _ = OnnxModel(exported("diffllama", "no cache")[1], 1).run(np.full((1, 6), 5), np.ones((1, 6), int), [])
    assert logits.shape[:2] == (1, 6)


def test_a_prompt_in_pieces_may_have_its_padding_anywhere(exported):
    """The native kernel alone computes several sequences in pieces; ONNX Runtime's own attention refuses them."""
    _, folder = exported("unilm-v1", "plain")
    model = OnnxModel(folder, 1, every_position=True)
    for name in ("left", "right", "holes"):
        ids, mask = batch_of(name)
        whole = calls(model, ids, mask, [7, *[1] * STEPS])
        for lengths in ([3, 4, *[1] * STEPS], [5, 2, 3]):
            found, kept = calls(model, ids, mask, lengths), mask.astype(bool)
            np.testing.assert_allclose(found[kept], whole[kept], rtol=0, atol=1e-4)


def test_a_mask_that_hides_the_only_new_token_is_refused(exported):
    """As masks of earlier versions did, whose columns were not those of the tokens."""
    _, folder = exported("diffllama", "portable")
    model = OnnxModel(folder, 1)
    _, cache = model.run(np.full((2, 3), 5), np.array([[1, 1, 1], [1, 0, 0]]), model.allocate_cache(2))
    with pytest.raises(CheckpointError, match="attention_mask is 0 for the only new token of a sequence"):
        model.run(np.full((2, 1), 5), np.array([[1, 1, 1, 1], [1, 1, 0, 0]]), cache)


def test_padding_behind_a_cache_is_refused_where_a_scale_of_logits_spans_rows(exported):
    _, folder = exported("diffllama", "logits per tensor")
    model = OnnxModel(folder, 1)
    _, cache = model.run(np.full((1, 3), 5), np.ones((1, 3), np.int64), model.allocate_cache(1))
    with pytest.raises(CheckpointError, match="would change the scale of quantized logits"):
        model.run(np.full((1, 3), 5), np.array([[1, 1, 1, 1, 1, 0]]), cache)
