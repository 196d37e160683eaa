"""A number format is one file: a toy serves every verb, and whoever reads integers alone refuses it by name."""

import csv
import json
import re
from pathlib import Path

import ml_dtypes
import pytest
import torch
from transformers import AutoModelForCausalLM

from diffquant.attention.logits import round_logits
from diffquant.checkpoints.compressed_config import quantization_config, read_schemes
from diffquant.checkpoints.compressed_tensors import unpack_weight
from diffquant.checkpoints.source import open_source
from diffquant.data import pocket_models
from diffquant.errors import CheckpointError, UsageError
from diffquant.kernels.cache.kv_store import store_refusal
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import csv_table
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.quantization.roundings.gptq import descent
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import FORMATS, NumberFormat, format_named, register
from diffquant.recipe.numbers.simulation import logit_format
from diffquant.recipe.scheme import Scheme
from tests.support import tiny_lm
from tests.support.nearest_weights import pack_weight
from tests.support.tables import in_one_test

READING = {"characters": 400, "window": 64, "stride": 32}
OPTIONS = SweepOptions(("perplexity",), bits=(16,), targets=("weights",), task_options=READING, dtype="float32")
NAME = "model.layers.1.mlp.down_proj.weight"


class Ternary(NumberFormat):
    """-1, 0 and 1, five of them in a byte, since 3^5 is 243: 1.6 bits each."""

    name = "ternary"
    levels = (-1, 0, 1)

    @property
    def packed_dtype(self):
        return torch.uint8

    def packed_width(self, length):
        return -(-length // 5)

    def pack(self, codes):
        fives = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 5)).unflatten(-1, (-1, 5)) + 1
        return (fives.to(torch.uint8) * torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)).sum(-1, dtype=torch.uint8)

    def unpack(self, stored, length):
        digits = stored[..., None] // torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8) % 3
        return digits.flatten(-2)[..., :length].to(torch.int8) - 1


def contributing_example():
    """The example of CONTRIBUTING, as it stands there."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.search(r"```python\n(# diffquant/recipe/numbers/formats/\w+\.py\n.*?)```", text, re.DOTALL).group(1)


@pytest.fixture
def ternary():
    """The toy format, known for one test."""
    register(Ternary())
    yield
    del FORMATS["ternary"]


@pytest.fixture
def e2m1():
    """The format of CONTRIBUTING's example, whose levels are no whole numbers."""
    exec(contributing_example(), {})
    yield
    del FORMATS["e2m1"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("tiny") / "diff-v2")


def test_a_format_needs_its_file_alone_to_be_quantized_loaded_and_swept(ternary, tmp_path):
    (model,) = (folder for folder in pocket_models("prose") if folder.name.endswith("v2"))
    file = tmp_path / "three.yaml"
    file.write_text("weights: ternary:g4\nk: ternary:row\nv: ternary:g8:rotated\nlogits: ternary:row\n")
    recipe = Recipe.read(file)
    quantize(model, tmp_path / "low", recipe)
    stored, simulated, plain = load(tmp_path / "low"), load(model, recipe), load(model)
    ours, exact = (each.get_parameter(NAME) for each in (simulated, plain))
    assert torch.equal(stored.get_parameter(NAME), ours)
    groups, exact = ours.float().unflatten(1, (-1, 4)), exact.float().unflatten(1, (-1, 4))
    step = groups.abs().amax(-1, keepdim=True)
    assert torch.equal(step, exact.abs().amax(-1, keepdim=True))
    assert torch.equal(groups, (exact / step).round() * step)

    result = run_sweep([model], OPTIONS.__class__(**vars(OPTIONS) | {"recipes": (file,)}), tmp_path / "sweep")
    swept = {each.point.target: each.result.details["perplexity"] for each in result.cells}
    assert swept["recipe"] == evaluate(tmp_path / "low", None, OPTIONS)["perplexity"].details["perplexity"]
    assert swept["recipe"] > 1.5 * swept[""]
    bytes_after = json.loads((tmp_path / "low" / "diffquant.json").read_text())["bytes"]
    row = next(csv.DictReader(line for line in csv_table(result).splitlines() if "three" in line or "bits" in line))
    assert (row["granularity"], int(row["weight_bytes"])) == ("three", bytes_after)
    assert float(row["kv_bytes_per_token"]) < 2560 / 4


def test_reports_name_the_format_and_the_bits_it_stores(ternary, checkpoint, tmp_path):
    recipe = Recipe.of(weights="ternary:row")
    report = quantize(checkpoint, tmp_path / "low", recipe)
    account = json.loads((tmp_path / "low" / "diffquant.json").read_text())
    tensor = account["tensors"][NAME]
    # Rows of 48 take 10 bytes of codes and 2 of a scale, and three numbers say the shape.
    assert (tensor["format"], tensor["granularity"], tensor["stored_bytes"]) == ("ternary", "row", 32 * 12 + 16)
    assert report.packed_bits == pytest.approx(account["packed_bits"], abs=1e-4)
    assert 1.6 < report.packed_bits < 3
    looked_at = inspect_checkpoint(tmp_path / "low")
    assert "recipe: weights ternary:row" in str(looked_at)
    assert looked_at.packed_bits["as it is"] == pytest.approx(report.packed_bits)
    planned = plan_quantization(open_source(checkpoint), recipe).table()
    assert re.search(r"down_proj.weight .* ternary:row +2\.08 ", planned)
    card = (tmp_path / "low" / "README.md").read_text()
    assert "| weights | ternary:row |" in card
    assert f"{report.packed_bits:.2f} stored bits per weight" in card


def test_stock_loaders_refuse_a_layout_of_our_own_and_the_card_says_so(ternary, tmp_path):
    llama = tiny_lm.write_llama(tmp_path / "llama")
    for weights in ("4:g16", "ternary:g16"):
        recipe = Recipe.of(weights=weights, overrides={"*.o_proj": "8:row"})
        quantize(llama, tmp_path / "low", recipe, overwrite=True)
        if weights == "4:g16":
            AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    with pytest.raises(ValueError, match="'ternary' is not a valid QuantizationType"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "low")
    card = (tmp_path / "low" / "README.md").read_text()
    assert "The codes of ternary are packed in a layout that only" in card
    assert "compressed-tensors refuse this folder" in card
    assert "- compressed-tensors" not in card
    assert {str(scheme) for scheme in load(tmp_path / "low").recipe.schemes} == {"ternary:g16", "8:row", "16"}


def test_a_folder_in_a_format_that_is_not_there_is_refused_by_its_name(checkpoint, tmp_path):
    register(Ternary())
    quantize(checkpoint, tmp_path / "low", "ternary:g16")
    del FORMATS["ternary"]
    with pytest.raises(CheckpointError, match="its format is 'diffquant-ternary'"):
        load(tmp_path / "low", Recipe())


def test_a_group_of_the_toys_layout_with_other_codes_is_refused_by_name(ternary):
    config = quantization_config({"model.layers.0.mlp.up_proj": Scheme.parse("ternary:g16")}, [])
    config["config_groups"]["group_0"]["weights"] |= {"type": "int", "num_bits": 4}
    with pytest.raises(CheckpointError, match="group_0 has int codes; group_0 has 4 bits"):
        read_schemes({"quantization_config": config}, ["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize(
    "rounding",
    ["mse", *({"name": name, "tokens": 256, "window": 64} for name in ("gptq", "tuned"))],
    ids=["mse", "gptq", "tuned"],
)
@pytest.mark.parametrize("name", ["ternary", "e2m1"])
def test_levels_even_or_not_take_a_rounding_and_lose_less_by_it(
    ternary, e2m1, checkpoint, tmp_path, name, rounding, monkeypatch
):
    monkeypatch.setattr(descent, "_STEPS", 20)
    near = quantize(checkpoint, tmp_path / "near", f"{name}:g16")
    fitted = quantize(checkpoint, tmp_path / "fitted", Recipe.of(weights=f"{name}:g16", rounding=rounding))
    assert load(tmp_path / "fitted").get_parameter(NAME).isfinite().all()
    if rounding == "mse":
        assert sum(e.error for e in fitted.errors) < 0.95 * sum(e.error for e in near.errors)


def test_uneven_levels_cannot_be_counted_from_a_rows_maximum(e2m1, ternary):
    with pytest.raises(UsageError, match="shift and uneven levels cannot be combined in e2m1:row:shift; leave out one"):
        Scheme.parse("e2m1:row:shift")
    logits, scheme = torch.tensor([[[[0.0, -4, -7, -9, -30]]]]), Scheme.parse("ternary:row:shift")
    # All three levels serve one side, down to 12 below the maximum.
    scale = logit_format(scheme.format, True).scale_for_largest(torch.tensor(30.0))
    assert round_logits(logits, scale, scheme).flatten().tolist() == [0, -6, -6, -12, -12]


def test_the_example_of_contributing_rounds_as_ml_dtypes_casts_to_four_bit_floats(e2m1):
    values = torch.cat([torch.linspace(-6, 6, 2401), torch.randn(512, generator=torch.Generator().manual_seed(0))])
    weight = torch.cat([values.clamp(-6, 6), torch.full((31,), 6.0)]).reshape(-1, 32).bfloat16()
    # Each group's largest magnitude is 6, so that its scale is 1.
    weight[:, 0] = 6.0
    scheme = Scheme.parse("e2m1:g32")
    packed = pack_weight(weight, scheme)
    assert packed["weight_packed"].shape == (len(weight), 4)
    assert (packed["weight_scale"] == 1).all()
    oracle = weight.float().numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32")
    assert torch.equal(unpack_weight(*packed.values(), scheme), torch.from_numpy(oracle))


def test_who_reads_integers_alone_refuses_the_toy_by_name(ternary, checkpoint, tmp_path):
    import diffquant
    from diffquant.onnx import export
    from diffquant.onnx.options import ExportOptions

    assert "k is ternary:row" in store_refusal(Recipe.of(kv="ternary"), 64, 64, torch.float16)
    for ask in (
        lambda: diffquant.export(checkpoint, tmp_path / "cache", kv="ternary"),
        lambda: ExportOptions.parse(weights="ternary:g16"),
        lambda: ExportOptions.parse(logits="ternary:row"),
        lambda: Scheme.parse("ternary:row").bits,
    ):
        with pytest.raises(UsageError, match="ternary is not an integer format of 2 to 8 bits"):
            ask()
    quantize(checkpoint, tmp_path / "low", "ternary:g16")
    with pytest.raises(UsageError, match=r"cannot export .*ternary:g16, and \d+ more: ternary is not an integer"):
        export(tmp_path / "low", tmp_path / "onnx")


@in_one_test(
    ("name", "levels", "message"),
    [
        ("4", (-1, 0, 1), "there is a format '4' already"),
        ("a:b", (-1, 0, 1), "lowercase letters"),
        ("Odd", (-1, 0, 1), "lowercase letters"),
        ("odd", (-1, 1), "must be ascending, include 0"),
        ("odd", (1, 0, -1), "must be ascending, include 0"),
    ],
)
def test_a_format_that_schemes_cannot_name_or_whose_levels_cannot_be_is_refused(name, levels, message):
    odd = Ternary()
    odd.name, odd.levels = name, levels
    with pytest.raises(UsageError, match=message):
        register(odd)


def test_there_is_one_object_a_format_wherever_a_scheme_travels(ternary):
    import copy
    import pickle

    for text in ("4:g32", "ternary:row", "16"):
        scheme = Scheme.parse(text)
        travelled = pickle.loads(pickle.dumps(scheme))
        assert travelled == scheme == copy.deepcopy(scheme)
        assert travelled.format is format_named(text.split(":")[0])
        assert hash(travelled) == hash(scheme)
