"""Rounding better than plain absmax in the same format: less error, the same tensors, the paper's own recurrence."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from diffquant.checkpoints.compressed_tensors import decode_codes
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.quantization.roundings.gptq import compensation
from diffquant.quantization.roundings.gptq.compensation import InputStatistics, compensate, damp, round_in_one_pass
from diffquant.quantization.roundings.nearest import round_to_nearest, round_with_clipping, search_scale
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

SCHEMES = ["4:g16", "4:row", "6:g16", "3:g16"]


def weight_and_inputs(rows=24, width=48):
    torch.manual_seed(0)
    mixing = torch.randn(width, width) * torch.logspace(0, -1.5, width)
    return torch.distributions.StudentT(4.0).sample((rows, width)), torch.randn(400, width) @ mixing


def read_back(rounded, scheme):
    return decode_codes(*rounded, scheme)


def output_error(values, weight, products):
    lost = (values - weight).double()
    return float(((lost @ products.double()) * lost).sum())


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fitted_scales_never_lose_and_compensation_wins_at_the_output(text, dtype):
    scheme = Scheme.parse(text)
    weight, x = weight_and_inputs()
    inputs = InputStatistics.factorize(damp(x.T @ x))
    plain, best = (read_back(f("", weight, scheme, dtype), scheme) for f in (round_to_nearest, round_with_clipping))
    made = read_back(compensate(weight, inputs, scheme, dtype), scheme)
    identity = torch.eye(48)
    assert output_error(best, weight, identity) < output_error(plain, weight, identity)
    assert output_error(made, weight, inputs.products) < 0.5 * output_error(best, weight, inputs.products)


@pytest.mark.parametrize(("bits", "slack"), [(2, 1.2), (3, 1.05), (4, 1.03), (6, 1.08), (8, 1.3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_fitted_scale_comes_near_the_best_of_a_thousand(bits, slack, weighted):
    torch.manual_seed(bits)
    values = torch.distributions.StudentT(5.0).sample((40, 32))
    weights = torch.rand(32) + 0.1 if weighted else torch.ones(32)

    def error(scale):
        kept = (values / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
        return ((kept - values).square() * weights).sum(-1)

    found = error(search_scale(values, format_named(str(bits)), torch.float32, weights if weighted else None))
    whole = format_named(str(bits)).compute_scale(values, -1)
    tried = torch.stack([error(whole * share * sign) for share in torch.linspace(0.1, 1.1, 500) for sign in (-1, 1)])
    assert (found <= error(whole) * (1 + 1e-6)).all()
    assert found.sum() < slack * tried.amin(0).sum()


def test_the_largest_magnitude_gets_the_lowest_code_on_either_side():
    values = torch.tensor([[8.0, 1, -2, 3], [-8.0, 1, -2, 3]])
    codes, scale = round_with_clipping("", values, Scheme.parse("4:g4"), torch.float16)
    assert scale.flatten().tolist() == [-1.0, 1.0]
    assert codes.tolist() == [[-8, -1, 2, -3], [-8, 1, -2, 3]]


@in_one_test("bits", [2, 4, 8])
def test_the_largest_half_floats_stay_finite(bits):
    largest = torch.finfo(torch.float16).max
    values = torch.tensor([[largest, -largest, 1.0, 0.0], [-largest, 0.9 * largest, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    scheme = Scheme.parse(f"{bits}:g4")
    inputs = InputStatistics.factorize(damp(torch.eye(4)))
    decoded = decode_codes(*compensate(values, inputs, scheme, torch.float16), scheme)
    assert decoded.isfinite().all()
    assert not decoded[2].any()
    assert decoded[0, 0] > largest / 4


@in_one_test("text", ["4:g16", "3:row"])
def test_the_pass_follows_the_papers_recurrence(text):
    """Equations 2 and 3: after each column the rest moves by its error, and its row leaves the inverse."""
    scheme = Scheme.parse(text)
    weight, x = weight_and_inputs(rows=5)
    product = (x.T @ x).double()
    inverse = torch.linalg.inv(product + 0.01 * product.diagonal().mean() * torch.eye(48))
    costs = torch.linalg.cholesky(inverse, upper=True).diagonal() ** -2
    moved, expected, scales = weight.double().clone(), torch.empty(5, 48), []
    size = scheme.granularity_size or 48
    for column in range(48):
        if column % size == 0:
            group = slice(column, column + size)
            scales.append(search_scale(moved[:, group].float(), scheme.format, torch.float32, costs[group].float()))
        scale = scales[-1][:, 0].double()
        code = (moved[:, column] / scale).round().clamp(-(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1)
        expected[:, column] = code.float()
        error = (moved[:, column] - code * scale) / inverse[column, column]
        moved -= error[:, None] * inverse[column]
        inverse -= inverse[:, column : column + 1] * inverse[column : column + 1] / inverse[column, column]
        inverse[column, column] = 1.0
    factor = InputStatistics.factorize(damp(x.T @ x)).factor
    codes, scale = (
        made.mT for made in round_in_one_pass(weight.mT.contiguous(), factor, scheme.format, size, torch.float32)
    )
    assert (codes == expected).float().mean() > 0.99
    assert (codes - expected).abs().max() <= 1
    torch.testing.assert_close(scale, torch.cat(scales, 1), rtol=1e-3, atol=0)


@in_one_test("text", ["4:g16", "3:row", "2:g12"])
def test_descent_only_lowers_the_error_and_ends_where_no_code_gains(text, monkeypatch):
    scheme = Scheme.parse(text)
    weight, x = weight_and_inputs(rows=7)
    inputs = InputStatistics.factorize(damp(x.T @ x))
    errors = []
    for passes in (0, 1, 2, 30):
        monkeypatch.setattr(compensation, "_PASSES", passes)
        codes, scale = compensate(weight, inputs, scheme, torch.float32)
        errors.append(output_error(read_back((codes, scale), scheme), weight, inputs.products))
    assert errors[0] > errors[1] > errors[2] >= errors[3]
    least, lowest = errors[3] * (1 - 1e-5), -(2 ** (scheme.bits - 1))
    for column in range(48):
        for step in (-1, 1):
            moved = codes.clone()
            moved[3, column] = (moved[3, column] + step).clamp(lowest, -lowest - 1)
            assert output_error(read_back((moved, scale), scheme), weight, inputs.products) >= least


def test_rows_in_blocks_are_rounded_as_together():
    """What `quantize` streams."""
    scheme = Scheme.parse("4:g16")
    weight, x = weight_and_inputs()
    inputs = InputStatistics.factorize(damp(x.T @ x))
    whole = compensate(weight, inputs, scheme, torch.float16)
    parts = [compensate(rows, inputs, scheme, torch.float16) for rows in weight.split(10)]
    codes, scale = (torch.cat(apart) for apart in zip(*parts, strict=True))
    assert (codes == whole[0]).float().mean() > 0.99
    assert (codes.int() - whole[0].int()).abs().max() <= 1
    torch.testing.assert_close(scale, whole[1], rtol=2**-10, atol=0)


def test_inputs_that_never_vary_do_no_harm():
    weight, x = weight_and_inputs()
    x[:, 7] = 0
    codes, scale = compensate(weight, InputStatistics.factorize(damp(x.T @ x)), Scheme.parse("4:g16"), torch.float32)
    assert torch.isfinite(scale).all()
    assert (codes[:, 7] != 0).any()


def test_every_rounding_writes_the_same_layout(checkpoint, tmp_path):
    read = {"tokens": 1024, "window": 128}
    rules = {"nearest": "nearest", "mse": "mse", "gptq": {"name": "gptq", **read}, "tuned": {"name": "tuned", **read}}
    errors, layouts = {}, {}
    exact = load(checkpoint, dtype=torch.float32)
    ids = torch.arange(5, 130)[None]
    for name, rule in rules.items():
        recipe = Recipe.of(weights="4:g16", overrides={"*.lambda_proj": "8:g16"}, rounding=rule)
        report = quantize(checkpoint, tmp_path / name, recipe)
        tensors = load_file(tmp_path / name / "model.safetensors")
        layouts[name] = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        errors[name] = sum(e.error for e in report.errors)
        assert json.loads((tmp_path / name / "diffquant.json").read_text())["rounding"]["name"] == name
        assert f"rounding: {name}" in (tmp_path / name / "README.md").read_text()
        assert load(tmp_path / name, dtype=torch.float32)(ids).logits.isfinite().all()
    assert layouts["nearest"] == layouts["mse"] == layouts["gptq"] == layouts["tuned"]
    assert errors["mse"] < errors["nearest"]
    assert exact(ids).logits.isfinite().all()
    packed = "model.layers.0.mlp.up_proj.weight_packed"
    for name in ("mse", "gptq", "tuned"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        width = int(tensors[packed.replace("packed", "shape")][1])
        codes = unpack_from_int32(tensors[packed], 4, torch.Size([tensors[packed].shape[0], width]))
        assert codes.amin() == -8
        scale = tensors[packed.replace("packed", "scale")]
        assert (scale < 0).any()
        stock = codes.float() * scale.float().repeat_interleave(16, 1)
        ours = load(tmp_path / name, dtype=torch.float32).get_parameter("model.layers.0.mlp.up_proj.weight")
        assert torch.equal(stock, ours)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", range(2, 9))
def test_fitted_scales_of_the_largest_numbers_decode_to_finite_values(bits, dtype):
    numbers = torch.finfo(dtype)
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(bits), dtype=torch.float64) * numbers.max
    weight, scheme = weight.clamp(-numbers.max, numbers.max).to(dtype), Scheme.parse(f"{bits}:g16")
    decoded = decode_codes(*round_with_clipping("w", weight.float(), scheme, scheme.format.scale_dtype(dtype)), scheme)
    assert torch.isfinite(decoded.to(dtype)).all()


def test_inputs_that_are_all_zero_are_damped_to_something_invertible():
    assert torch.linalg.eigvalsh(damp(torch.zeros(5, 5)).double()).min() > 0
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    inputs = InputStatistics.factorize(damp(x.T @ x))
    torch.testing.assert_close(
        inputs.factor.double().T @ inputs.factor.double(), inputs.products.double().inverse(), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(inputs.factor, inputs.factor.triu())
