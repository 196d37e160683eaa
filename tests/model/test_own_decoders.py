"""What Motif-3 and Phi-4-mini-flash owe alike, whatever their layers keep of the past."""

import pytest
import torch

from diffquant import Recipe, load
from diffquant.model.cache import PackedLayer
from diffquant.model.windowed_cache import WindowedLayer
from tests.support.checkpoints import MOTIF3, PHI4FLASH, write_random
from tests.support.decoding import check_padding, check_pieces
from tests.support.tables import in_one_test

CONFIGS = {"motif3": MOTIF3, "phi4flash": PHI4FLASH["phi4flash"]}
# λ, norms and gates are computed in float32, whatever the model is in.
TOLERANCE = {"motif3": 1e-5, "phi4flash": 2e-6}


def random_ids(batch, length):
    return torch.randint(0, MOTIF3["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module", params=CONFIGS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind) / "model"
    write_random(folder, CONFIGS[kind], torch.float64)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@in_one_test("pieces", [[1] * 19, [7, 1, 1, 9, 1], [18, 1]])
def test_decoding_in_steps_is_reading_at_once(model, kind, pieces):
    check_pieces(model, random_ids(2, 19), pieces, TOLERANCE[kind])


@in_one_test("scheme", ["8", "4:row:rotated"])
def test_a_quantized_latent_reads_alike_at_once_and_in_steps(folder, kind, scheme):
    if kind == "motif3":
        check_pieces(load(folder, Recipe.of(kv=scheme)), random_ids(2, 19), [7, 1, 1, 10], TOLERANCE[kind])


def test_padding_on_either_side_and_in_between_changes_nothing(model, kind):
    check_padding(model, random_ids(1, 17)[0], TOLERANCE[kind])


def test_layers_with_a_window_hold_no_more_than_it(model, kind):
    cache, lengths = model.new_cache(), []
    for part in random_ids(2, 24).split([9, 1, 1, 13], 1):
        model(part, past_key_values=cache)
        layers = cache.layers if kind == "motif3" else cache.layers[1::2]
        lengths.append([layer.get_seq_length() for layer in layers])
    of_layers = {"motif3": [None, 2, None, 2, None], "phi4flash": [5, 5, None]}[kind]
    assert lengths == [[window or whole for window in of_layers] for whole in (9, 10, 11, 24)]
    assert cache.get_seq_length() == 24


def test_it_generates_greedily_what_reading_the_whole_text_each_time_gives(model):
    text = random_ids(2, 9)
    made = model.generate(text, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    for _ in range(12):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, text)


@in_one_test(
    ("dtype", "errors"),
    [
        (torch.bfloat16, {"motif3": 0.05, "phi4flash": 0.03}),
        (torch.float16, {"motif3": 0.01, "phi4flash": 0.004}),
    ],
)
def test_half_types_compute_the_same_but_for_their_rounding(tmp_path, kind, dtype, errors):
    # All experts of each token: which ones are chosen would turn on rounding.
    every = {"experts_top_k": MOTIF3["num_experts"]} if kind == "motif3" else {}
    write_random(tmp_path / "model", CONFIGS[kind] | every, torch.float64)
    ids = random_ids(2, 33)
    wanted, half = load(tmp_path / "model")(ids).logits, load(tmp_path / "model", dtype=dtype)
    cache = half.new_cache()
    steps = torch.cat([half(part, past_key_values=cache).logits for part in ids.split([20, 1, 12], 1)], 1)
    for logits in (half(ids).logits, steps):
        assert logits.dtype == dtype
        assert (logits - wanted).norm() < errors[kind] * wanted.norm()


def test_a_saved_model_is_the_model(model, kind, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").double()
    assert again.model.architecture == model.model.architecture
    ids = random_ids(1, 11)
    for each in (again, load(tmp_path / "saved")):
        torch.testing.assert_close(each(ids).logits, model(ids).logits, rtol=0, atol=TOLERANCE[kind])


@in_one_test("schemes", [{"kv": "8"}, {"k": "4", "v": "6"}, {"kv": "8", "residual": 3}])
def test_what_a_quantized_cache_forgets_no_later_token_sees(folder, kind, schemes, monkeypatch):
    """A cache that forgets nothing gives the same: codes and scales of what stays do not change."""
    if schemes == {"k": "4", "v": "6"}:
        schemes = {"motif3": {"k": "4:g2", "v": "4:row:rotated"}, "phi4flash": {"k": "4:c4", "v": "6"}}[kind]
    model = load(folder, Recipe.of(**schemes))
    ids = random_ids(2, 21)

    def decoded():
        cache = model.new_cache()
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(1, 1)], 1)

    forgetting = decoded()
    monkeypatch.setattr(WindowedLayer, "update", PackedLayer.update)
    torch.testing.assert_close(forgetting, decoded(), rtol=0, atol=TOLERANCE[kind])
    assert not torch.allclose(forgetting, load(folder)(ids).logits, rtol=0, atol=1e-4)
