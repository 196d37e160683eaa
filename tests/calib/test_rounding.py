"""Rounding better than plain absmax in the same format: less error, the same tensors, the paper's own recurrence."""

import json

import pytest
import tiny_lm
import torch
from safetensors.torch import load_file

from diffquant.calib.gptq import compensate, factor, gptq
from diffquant.checkpoint.codec import decode_codes
from diffquant.checkpoint.load import load
from diffquant.checkpoint.quantize import quantize
from diffquant.checkpoint.rounding import CLIPPED, NEAREST, clipped, clipped_scale, nearest
from diffquant.errors import UsageError
from diffquant.scheme import Recipe, Scheme

SCHEMES = ["4:g16", "4:row", "6:g16", "3:g16"]


def weight_and_inputs(rows=24, width=48):
    torch.manual_seed(0)
    mixing = torch.randn(width, width) * torch.logspace(0, -1.5, width)
    return torch.distributions.StudentT(4.0).sample((rows, width)), torch.randn(400, width) @ mixing


def read_back(rounded, scheme):
    return decode_codes(*rounded, scheme)


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_never_loses_and_compensation_wins_at_the_output(text, dtype):
    scheme = Scheme.parse(text)
    weight, x = weight_and_inputs()
    plain, best = (read_back(f("", weight, scheme, dtype), scheme) for f in (nearest, clipped))
    made = read_back(compensate(weight, factor(x.T @ x), scheme, dtype), scheme)

    def lost(rounded, by):
        return float(((rounded - weight) @ by).square().sum())

    assert lost(best, torch.eye(48)) < lost(plain, torch.eye(48))
    assert lost(made, x.T) < 0.7 * lost(best, x.T)


@pytest.mark.parametrize("text", ["4:g16", "3:row"])
def test_compensation_follows_the_papers_recurrence(text):
    """Equations 2 and 3: after each column the rest moves by its error, and its row leaves the inverse."""
    scheme = Scheme.parse(text)
    weight, x = weight_and_inputs(rows=5)
    product = (x.T @ x).double()
    inverse = torch.linalg.inv(product + 0.01 * product.diagonal().mean() * torch.eye(48))
    moved, expected, scales = weight.double().clone(), torch.empty(5, 48), []
    size = scheme.size or 48
    for column in range(48):
        if column % size == 0:
            group = moved[:, column : column + size].float()
            scales.append(clipped_scale(group, Scheme(scheme.bits, "row"), torch.float32))
        scale = scales[-1][:, 0].double()
        largest = 2 ** (scheme.bits - 1) - 1
        code = (moved[:, column] / scale).round().clamp(-largest, largest)
        expected[:, column] = code.float()
        error = (moved[:, column] - code * scale) / inverse[column, column]
        moved -= error[:, None] * inverse[column]
        inverse -= inverse[:, column : column + 1] * inverse[column : column + 1] / inverse[column, column]
        inverse[column, column] = 1.0
    codes, scale = compensate(weight, factor(x.T @ x), scheme, torch.float32)
    assert (codes.float() == expected).float().mean() > 0.99
    torch.testing.assert_close(scale, torch.cat(scales, 1), rtol=1e-3, atol=0)


def test_inputs_that_never_vary_do_no_harm():
    weight, x = weight_and_inputs()
    x[:, 7] = 0
    codes, scale = compensate(weight, factor(x.T @ x), Scheme.parse("4:g16"), torch.float32)
    assert torch.isfinite(scale).all()
    assert codes.abs().max() <= 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "diff-v2")


def test_every_rounding_writes_the_same_layout(checkpoint, tmp_path):
    recipe = Recipe.of(weights="4:g16", overrides={"*.lambda_proj": "8:g16"})
    rules = {"nearest": NEAREST, "mse": CLIPPED, "gptq": gptq(checkpoint, tokens=1024, window=128)}
    errors, layouts = {}, {}
    exact = load(checkpoint, dtype=torch.float32)
    ids = torch.arange(5, 130)[None]
    for name, rule in rules.items():
        report = quantize(checkpoint, tmp_path / name, recipe, rounding=rule)
        tensors = load_file(tmp_path / name / "model.safetensors")
        layouts[name] = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        errors[name] = sum(e.error for e in report.errors)
        assert json.loads((tmp_path / name / "diffquant.json").read_text())["rounding"]["name"] == name
        assert f"rounding: {name}" in (tmp_path / name / "README.md").read_text()
        assert load(tmp_path / name, dtype=torch.float32)(ids).logits.isfinite().all()
    assert layouts["nearest"] == layouts["mse"] == layouts["gptq"]
    assert errors["mse"] < errors["nearest"]
    assert exact(ids).logits.isfinite().all()


def test_a_scale_over_all_rows_takes_nearest_alone(checkpoint, tmp_path):
    with pytest.raises(
        UsageError, match=r"rounding mse works row by row and model\.layers\.0.*have one scale a tensor"
    ):
        quantize(checkpoint, tmp_path / "out", Recipe.of(weights="8:tensor"), rounding=CLIPPED)
    assert not (tmp_path / "out").exists()
