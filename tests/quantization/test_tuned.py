"""Tuned rounding: it brings layers nearer to the 16-bit model than gptq's codes, or leaves those."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import kl_div

from diffquant import Recipe, load, quantize
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.tokens import encode_windows
from diffquant.data import books_text, pocket_models
from diffquant.errors import UsageError
from diffquant.quantization.roundings import gptq as rule
from diffquant.quantization.roundings.gptq import descent, sequence
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.recipe.scheme import Scheme
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

READ = {"tokens": 1024, "window": 64}
# One of every way in which heads form maps; unilm-v1 and motif-grouped store rows in another order than the model's.
FAMILY = ["diffllama", "llama", "unilm-v1", "unilm-v2", "motif-grouped", "gated"]


@pytest.fixture
def fewer_steps(monkeypatch):
    monkeypatch.setattr(descent, "_STEPS", 50)


@pytest.fixture
def checkpoint(tmp_path, request):
    folder = write_checkpoint(tmp_path / "source", request.param, vocab_size=tiny_lm.WORDS)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def low_bit(checkpoint, name, bits="3:g16"):
    quantize(checkpoint, checkpoint.with_name(name), Recipe.of(weights=bits, rounding={"name": name, **READ}))
    return checkpoint.with_name(name)


def lost(folder, source, ids):
    """Squared error of the last layer's output on a text."""
    return float((last_hidden(folder, ids) - last_hidden(source, ids)).square().sum())


def last_hidden(folder, ids):
    model, seen = load(folder, dtype=torch.float32), []
    model.model.layers[-1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    model(ids)
    return seen[0]


@pytest.mark.usefixtures("fewer_steps")
@pytest.mark.parametrize(
    ("checkpoint", "scheme"),
    [
        *sampled([(name, "3:g16") for name in FAMILY], 2),
        *sampled([("unilm-v2", name) for name in ("nvfp4", "nvfp4_4over6", "mxfp4", "e4m3:row")], 4),
    ],
    indirect=["checkpoint"],
)
def test_the_text_that_is_read_loses_less_than_by_gptq(checkpoint, scheme):
    tokenizer = open_source(checkpoint).tokenizer
    ids = encode_windows(load(checkpoint), tokenizer, books_text(), READ["window"], READ["tokens"])
    by_gptq, by_tuned = (lost(low_bit(checkpoint, name, scheme), checkpoint, ids) for name in ("gptq", "tuned"))
    assert by_tuned < 0.9 * by_gptq


@thorough
@pytest.mark.parametrize("source", pocket_models("prose"), ids=lambda source: source.name)
def test_another_text_is_predicted_more_as_by_the_16_bit_model_than_after_gptq(source):
    model = load(source, dtype=torch.float32)
    ids = encode_windows(model, open_source(source).tokenizer, books_text()[-40_000:], 256, 8192)
    exact = model(ids).logits.log_softmax(-1)

    def divergence(name):
        low = load(source, Recipe.of(weights="4:row", rounding={"name": name, "window": 256}), torch.float32)
        return float(kl_div(low(ids).logits.log_softmax(-1), exact, reduction="batchmean", log_target=True))

    assert divergence("tuned") < 0.95 * divergence("gptq")


@pytest.mark.parametrize("checkpoint", ["unilm-v2"], indirect=True)
def test_a_layer_that_does_not_gain_keeps_gptqs_codes(checkpoint, monkeypatch):
    monkeypatch.setattr(descent, "_STEPS", 2)
    monkeypatch.setattr(descent, "_CODE_TRAVEL", 50.0)
    # Batches of one size add alike, so that gptq's codes are the same in both.
    monkeypatch.setattr(rule.Tuned, "window", sequence.BATCH_TOKENS)
    gptq, tuned = (load_file(low_bit(checkpoint, name) / "model.safetensors") for name in ("gptq", "tuned"))
    assert gptq.keys() == tuned.keys()
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in gptq.items())


@thorough
@pytest.mark.usefixtures("fewer_steps")
@pytest.mark.parametrize("checkpoint", ["unilm-v2"], indirect=True)
def test_a_seed_decides_the_order_of_windows_and_so_the_codes(checkpoint):
    def codes(**seed):
        rounding = {"name": "tuned", **READ, **seed}
        quantize(
            checkpoint, folder := checkpoint.with_name("low"), Recipe.of("3:g16", rounding=rounding), overwrite=True
        )
        return load_file(folder / "model.safetensors")

    unsaid, first, second = codes(), codes(seed=0), codes(seed=1)
    assert all(torch.equal(tensor, first[name]) for name, tensor in unsaid.items())
    assert any(not torch.equal(tensor, second[name]) for name, tensor in unsaid.items())
    with pytest.raises(
        UsageError, match="seed affects only rows of a JSONL file or dataset, but rounding gptq reads plain text"
    ):
        quantize(checkpoint, checkpoint.with_name("no"), Recipe.of("3:g16", rounding={"name": "gptq", "seed": 1}))
    with pytest.raises(UsageError, match="seed must be a whole number, 0 or more, got -1"):
        Recipe.of("3:g16", rounding={"name": "tuned", "seed": -1})


@pytest.mark.usefixtures("fewer_steps")
@pytest.mark.parametrize("checkpoint", ["diffllama"], indirect=True)
def test_load_finds_the_codes_that_quantize_stores(checkpoint):
    stored = load(low_bit(checkpoint, "tuned"), dtype=torch.float32)
    again = load(checkpoint, Recipe.of(weights="3:g16", rounding={"name": "tuned", **READ}), torch.float32)
    for name, weight in again.named_parameters():
        assert torch.equal(stored.get_parameter(name), weight), name


def latent_of(weight, codes, scale, bits=3, size=2):
    return descent._Latent(weight, (torch.tensor(codes, dtype=torch.int8), scale), Scheme.parse(f"{bits}:g{size}"))


def test_weights_start_between_their_codes_and_where_the_16_bit_weight_is():
    weight, scale = torch.tensor([[-2.1, 1.4, -0.3, 0.06]]), torch.tensor([[0.5, -0.25]])
    latent = latent_of(weight, [[-4, 3, 1, 0]], scale)
    torch.testing.assert_close(latent.place.detach(), torch.tensor([[-4.2, 2.8, 1.2, -0.24]]))
    far = latent_of(weight + 0.4, [[-4, 3, 1, 0]], scale)
    torch.testing.assert_close(far.place.detach(), torch.tensor([[-3.7, 3.3, 0.7, -0.3]]))
    assert torch.equal(far.to_codes()[0], torch.tensor([[-4, 3, 1, 0]]))


def float_latent(name, weight):
    """A weight [rows, block] of a format with blocks of its own, as absmax rounds it."""
    scheme = Scheme.parse(name).with_tensor_scale(weight.abs().amax())
    return descent._Latent(weight, round_to_nearest("", weight, scheme, torch.float32), scheme), scheme.format


def test_floats_start_between_their_levels():
    weight = torch.tensor([[6.0, 4.4, -2.6, 0.3, 0, 1.1, 3.0, -0.7] * 4])
    latent, _ = float_latent("mxfp4", weight)
    # Levels around 4, -3, 0.5, 1 and -0.5 are 3 and 6, -4 and -2, 0 and 1, 0.5 and 1.5, -1 and 0.
    expected = [7, 6 + 0.4 / 1.5, -5 + 0.3, 1 - 0.3, 0, 2 + 0.1 / 0.5, 5, -1 - 0.3]
    torch.testing.assert_close(latent.place.detach()[0, :8], torch.tensor(expected))


@in_one_test("name", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp6", "mxfp8"])
def test_gradients_of_floats_pass_through_levels_and_stored_scales(name):
    torch.manual_seed(0)
    latent, number_format = float_latent(name, torch.randn(6, 64))
    latent.place.data += torch.randn(6, 64)
    latent.stay_in_range()
    latent.stretch.data.normal_(0, 0.1)
    upstream = torch.randn(6, 64)
    with torch.enable_grad():
        latent().mul(upstream).sum().backward()
        place, stretch = latent.place.detach().requires_grad_(), latent.stretch.detach().requires_grad_()
        # A line through each level, as steep as its neighbours lie apart.
        levels = torch.tensor(number_format.levels)
        at = place.detach().round().int() + number_format.levels.index(0)
        steps = torch.gradient(levels)[0]
        steps[0], steps[-1] = levels[1] - levels[0], levels[-1] - levels[-2]
        line = levels[at] + steps[at] * (place - place.detach())
        stretched = latent._scale * (1 + stretch)
        stored = stretched + (number_format.round_scale(stretched.detach(), torch.float32) - stretched.detach())
        weight = line * stored.repeat_interleave(number_format.block, 1)
        (weight * upstream).sum().backward()
    torch.testing.assert_close(latent().detach(), weight.detach())
    torch.testing.assert_close(latent.place.grad, place.grad)
    torch.testing.assert_close(latent.stretch.grad, stretch.grad)


@in_one_test("name", ["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp8_e5m2"])
def test_floats_descend_on_what_is_stored(name):
    torch.manual_seed(0)
    latent, number_format = float_latent(name, torch.randn(6, 64))
    latent.place.data += 20 * torch.randn(6, 64)
    latent.stay_in_range()
    latent.stretch.data.normal_(0, 0.1)
    codes, scale = latent.to_codes()
    ends = torch.tensor([number_format.lowest, number_format.largest])
    assert torch.equal(number_format.levels_of(codes, torch.float32).unique()[[0, -1]], ends)
    stored = number_format.unpack_scale(number_format.pack_scale(scale), number_format.tensor_scale)
    assert torch.equal(stored, scale)
    read = number_format.levels_of(codes, torch.float32) * stored.repeat_interleave(number_format.block, 1)
    assert torch.equal(read, latent())


def test_gradients_pass_through_rounding():
    scale = torch.tensor([[0.5, -0.25]], dtype=torch.float64)
    latent = latent_of(torch.tensor([[-2.1, 1.4, -0.3, 0.06]]), [[-4, 3, 1, 0]], scale)
    latent.stretch.data = torch.tensor([[0.5, -0.1]])
    upstream = torch.tensor([[1.0, 2.0, 3.0, 5.0]])
    with torch.enable_grad():
        (latent() * upstream).sum().backward()
        place, stretch = latent.place.detach().requires_grad_(), latent.stretch.detach().requires_grad_()
        passed = place + (place.round() - place).detach()
        weight = passed * (scale.float() * (1 + stretch)).repeat_interleave(2, 1)
        (weight * upstream).sum().backward()
    torch.testing.assert_close(latent().detach(), weight.detach())
    torch.testing.assert_close(latent.place.grad, place.grad)
    torch.testing.assert_close(latent.stretch.grad, stretch.grad)


def test_places_beyond_the_last_codes_come_back_to_them():
    latent = latent_of(torch.zeros(1, 4), [[0, 0, 0, 0]], torch.ones(1, 2))
    latent.place.data = torch.tensor([[-9.0, 9.0, -4.1, 2.9]])
    latent.stay_in_range()
    torch.testing.assert_close(latent.place.detach(), torch.tensor([[-4.3, 3.3, -4.1, 2.9]]))


def test_rounded_as_it_is_computed():
    torch.manual_seed(0)
    module = nn.Linear(32, 8, bias=False)
    scheme, scale = Scheme.parse("4:row"), torch.full((8, 1), 0.03, dtype=torch.float16)
    latent = descent._Latent(module.weight, (torch.randint(-8, 8, (8, 32)).to(torch.int8), scale), scheme)
    latent.place.data += torch.randn(8, 32)
    latent.stay_in_range()
    latent.stretch.data.normal_(0, 0.1)
    codes, stretched = latent.to_codes()
    assert stretched.dtype == scale.dtype
    assert (int(codes.min()), int(codes.max())) == (-8, 7)
    torch.testing.assert_close(codes.float() * stretched.float(), latent(), rtol=1e-3, atol=0)
