from itertools import permutations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from diffquant.checkpoints.compressed_config import quantization_config, read_schemes
from diffquant.checkpoints.compressed_targets import pick_targets
from diffquant.checkpoints.compressed_tensors import packed_shapes, unpack_weight, weight_codes
from diffquant.errors import CheckpointError
from diffquant.recipe.numbers.absmax import max_code
from diffquant.recipe.scheme import Scheme
from tests.support.nearest_weights import pack_weight
from tests.support.tables import in_one_test

SCHEMES = ["4:g32", "6:row", "8:tensor", "4:g16", "6:g32", "3:row", "2:tensor"]
LINEARS = [f"model.layers.{i}.{part}" for i in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")] + ["lm_head"]


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_packed_words_are_compressed_tensors_own(text, dtype):
    scheme, weight = Scheme.parse(text), torch.randn(17, 96).to(dtype)
    packed, scale, shape = pack_weight(weight, scheme).values()
    assert torch.equal(packed, pack_to_int32(weight_codes(weight, scale, scheme), scheme.bits))
    assert [tuple(t.shape) for t in (packed, scale, shape)] == list(packed_shapes((17, 96), scheme).values())
    assert scale.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    assert shape.tolist() == [17, 96]


@in_one_test("text", ["4:row", "6:row", "8:tensor"])
def test_a_width_that_fills_no_word_survives_the_round_trip(text):
    scheme, weight = Scheme.parse(text), torch.randn(5, 37)
    packed, scale, shape = pack_weight(weight, scheme).values()
    decoded = unpack_weight(packed, scale, shape, scheme)
    assert decoded.shape == weight.shape
    assert (decoded - weight).abs().max() <= scale.float().max() * 0.5001


@given(
    bits=st.integers(2, 8),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    exponent=st.integers(-40, 38),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_codes_against_the_stored_scale_are_off_by_half_a_step_at_any_magnitude(bits, dtype, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    largest = torch.finfo(dtype).max
    weight = (torch.randn(4, 32, generator=generator, dtype=torch.float64) * 10.0**exponent).clamp(-largest, largest)
    weight, scheme = weight.to(dtype), Scheme.parse(f"{bits}:g16")
    packed, scale, shape = pack_weight(weight, scheme).values()
    decoded = unpack_weight(packed, scale, shape, scheme)
    assert torch.isfinite(decoded).all()
    step = scale.double().repeat_interleave(16, dim=1)
    # Only near the largest number is the scale made smaller, so that its products can be held.
    numbers = torch.finfo(scale.dtype)
    lost = step * max_code(bits) * numbers.eps * (weight.double().abs() > numbers.max * (1 - 2 * numbers.eps))
    assert ((decoded.double() - weight.double()).abs() <= step / 2 * (1 + 1e-6) + lost).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", range(2, 9))
def test_scales_too_small_for_their_digits_are_rounded_up_and_clip_nothing(bits, dtype):
    numbers = torch.finfo(dtype)
    steps = torch.arange(1, 400, dtype=torch.float64)[:, None] / 7
    weight = (steps * numbers.smallest_normal * numbers.eps * torch.linspace(-1, 1, 32)).to(dtype)
    packed, scale, shape = pack_weight(weight, Scheme.parse(f"{bits}:row")).values()
    decoded = unpack_weight(packed, scale, shape, Scheme.parse(f"{bits}:row"))
    assert (scale > 0).all()
    assert ((decoded.double() - weight.double()).abs() <= scale.double() / 2 * (1 + 1e-6)).all()


def test_an_all_zero_weight_decodes_to_zero():
    scheme = Scheme.parse("4:g32")
    packed, scale, shape = pack_weight(torch.zeros(3, 64, dtype=torch.float16), scheme).values()
    assert (scale == 1).all()
    assert not unpack_weight(packed, scale, shape, scheme).any()


def test_mixed_schemes_read_back_as_written():
    schemes = {name: Scheme.parse("4:g32" if "mlp" in name else "8:row") for name in LINEARS if name != "lm_head"}
    schemes["model.layers.1.mlp.up_proj"] = Scheme.parse("6:tensor")
    del schemes["model.layers.11.mlp.up_proj"]
    config = quantization_config(schemes, LINEARS)
    assert read_schemes({"quantization_config": config}, schemes) == schemes
    assert len(config["config_groups"]) == 3
    assert all(len(group["targets"]) == 1 for group in config["config_groups"].values())
    QuantizationConfig.model_validate(config)


def with_weights(**changes):
    config = quantization_config({"model.layers.0.mlp.up_proj": Scheme.parse("4:g32")}, LINEARS)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def with_targets(targets):
    config = with_weights()
    config["config_groups"]["group_0"]["targets"] = targets
    return config


@in_one_test(
    ("entry", "complaint"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized by 'gptq'"),
        (with_weights() | {"format": "sparse-24"}, "format is 'sparse-24'"),
        (with_weights() | {"format": "float-quantized"}, "has int codes; group_0 has 4 bits"),
        (with_weights() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (with_weights(symmetric=False), "group_0 is asymmetric"),
        (with_weights(type="float"), "has float codes"),
        (with_weights(strategy="block"), "strategy 'block'"),
        (with_weights(num_bits=1), "has 1 bits"),
        (with_weights(num_bits=9), "has 9 bits"),
        (with_targets("Linear"), "has no list of targets"),
        (with_targets([7]), "has no list of targets"),
        (with_targets(["re:("]), r"'\(' is not a regular expression"),
        (with_weights(group_size=None), "has no group_size"),
        (with_weights(actorder="group"), "reorders columns"),
        (None, "yet the weights of .*up_proj are packed"),
    ],
)
def test_what_is_not_read_is_refused_by_name(entry, complaint):
    config = {} if entry is None else {"quantization_config": entry}
    with pytest.raises(CheckpointError, match=complaint):
        read_schemes(config, ["model.layers.0.mlp.up_proj"])


@in_one_test("module", ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "lm_head"])
def test_of_several_targets_the_one_is_taken_that_compressed_tensors_takes(module):
    for targets in permutations(["re:.*mlp", "re:.*down_proj$", "Linear", "model.layers.0.mlp.up_proj"]):
        chosen = match_targets(module, torch.nn.Linear(1, 1), targets)[0]
        assert pick_targets([module], {target: target for target in targets}) == {module: chosen}


def test_packed_weights_that_no_group_covers_are_named():
    config = {"quantization_config": quantization_config({"model.layers.0.mlp.up_proj": Scheme.parse("4:g32")}, [])}
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["model.layers.9.mlp.up_proj"]
    with pytest.raises(CheckpointError, match=r"no group .* covers .*model\.layers\.0\.mlp\.up_proj"):
        read_schemes(config, ["model.layers.0.mlp.up_proj"])
