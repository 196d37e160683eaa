"""A mixture of experts of three files, taken through every verb: nothing else of diffquant knows it."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

import diffquant
from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, GroupSizeError, ToleranceError, UsageError
from diffquant.model.adapters import READERS, register
from diffquant.model.blocks import MLPBlock
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from tests.support import tiny_lm
from tests.support.checkpoints import SIZES, write_random
from tests.support.mixture_adapter import ExpertsBlock, read_mixture
from tests.support.planted import PlantedExport

ROOT = Path(__file__).parents[2]
MIXTURE = SIZES | {
    "model_type": "mixture",
    "attention": "diff_v2",
    "vocab_size": tiny_lm.WORDS,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "dense_layers": 1,
}
EXPERTS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (1, 2) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture(autouse=True)
def mixture():
    register("mixture")(read_mixture)
    yield
    del READERS["mixture"]


@pytest.fixture
def ungated(monkeypatch):
    """The example of CONTRIBUTING.md, as if its three files were there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    place = "(diffquant/(?:model|onnx)/(?:adapters/llama_|architectures/)?ungated)"
    examples = re.findall(rf"```python\n# {place}\.py\n(.*?)```", text, re.DOTALL)
    for place, code in examples:
        module = ModuleType(place.replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, vars(module))
    yield
    del READERS["llama_ungated"]


@pytest.fixture
def checkpoint(tmp_path):
    write_random(tmp_path / "plain", MIXTURE, torch.bfloat16)
    tiny_lm.tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def logits(folder, recipe=None):
    ids = torch.randint(0, tiny_lm.WORDS, (2, 19), generator=torch.Generator().manual_seed(0))
    return load(folder, recipe, dtype=torch.float32)(ids).logits


def test_it_computes_what_mixtral_computes(tmp_path):
    sizes = SIZES | {"num_key_value_heads": 4, "num_local_experts": 5, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    oracle = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    save_file(oracle.state_dict(), tmp_path / "model.safetensors")
    config = oracle.config.to_dict() | {"model_type": "mixture", "attention": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(0, SIZES["vocab_size"], (2, 37))
    torch.testing.assert_close(load(tmp_path)(ids).logits, oracle(ids).logits, rtol=0, atol=1e-4)


def test_it_is_inspected_without_a_model(checkpoint):
    found = inspect_checkpoint(checkpoint)
    assert found.kinds == {"attention": 1, "attention with experts": 2}
    assert found.parameters == sum(x.numel() for x in load_file(checkpoint / "model.safetensors").values())
    assert found.sizes["4:g32"] < found.sizes["8:g32"] < found.sizes["16"]


def test_its_experts_are_packed_read_back_and_scored(checkpoint, tmp_path):
    recipe = Recipe.of(weights="4:g32")
    quantize(checkpoint, tmp_path / "low", recipe)
    plain, low = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "low"))
    assert set(EXPERTS) < set(open_source(tmp_path / "low").packed)
    state = load(tmp_path / "low", dtype=torch.float32).state_dict()
    for name in EXPERTS:
        packed, scale, shape = (low[name + suffix] for suffix in (PACKED, SCALE, SHAPE))
        assert shape.tolist() == list(plain[name].shape)
        for expert, words in enumerate(packed):
            codes = unpack_from_int32(words, 4, torch.Size(plain[name].shape[1:])).float()
            values = (codes.unflatten(-1, (-1, 32)) * scale[expert].float()[..., None]).flatten(-2)
            assert torch.equal(state[name][expert], values)
            assert (values - plain[name][expert].float()).abs().max() <= scale[expert].float().max() * 0.51
    assert torch.equal(low["model.layers.1.mlp.gate.weight"], plain["model.layers.1.mlp.gate.weight"])
    assert torch.equal(logits(tmp_path / "low"), logits(checkpoint, recipe))
    scores = [
        diffquant.evaluate(folder, "perplexity", given, characters=600, dtype="float32")["perplexity"].details
        for folder, given in ((tmp_path / "low", None), (checkpoint, recipe), (checkpoint, None))
    ]
    assert scores[0] == scores[1]
    assert scores[0]["perplexity"] != scores[2]["perplexity"]


def test_large_experts_are_rounded_in_blocks_to_the_same_values(checkpoint, tmp_path, monkeypatch):
    """A block of rows may begin inside one expert and end in another."""
    wanted = logits(checkpoint, Recipe.of(weights="4:row"))
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", 40 * 64)
    quantize(checkpoint, tmp_path / "low", Recipe.of(weights="4:row"))
    assert torch.equal(logits(tmp_path / "low"), wanted)


def test_the_card_says_that_stock_loaders_do_not_find_experts(checkpoint, tmp_path):
    quantize(checkpoint, tmp_path / "low", Recipe.of(weights="4:g32"))
    card = (tmp_path / "low" / "README.md").read_text()
    assert "experts in one tensor are packed along their last axis" in card
    assert "modeling_diffquant" not in card
    assert not list((tmp_path / "low").glob("*.py"))


def test_a_saved_model_is_the_model(checkpoint, tmp_path):
    load(checkpoint, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["model_type"] == "mixture"
    assert type(load(checkpoint)).from_pretrained(tmp_path / "saved").model.architecture == (
        open_source(checkpoint).architecture
    )


def test_the_example_of_contributing_runs(ungated, tmp_path):
    config = SIZES | {"model_type": "llama_ungated", "vocab_size": tiny_lm.WORDS}
    tensors = write_random(tmp_path / "plain", config, torch.float32)
    quantize(tmp_path / "plain", tmp_path / "low", Recipe.of(weights="4:g32"))
    assert len(open_source(tmp_path / "low").packed) == SIZES["num_hidden_layers"] * 6
    assert torch.equal(logits(tmp_path / "low"), logits(tmp_path / "plain", Recipe.of(weights="4:g32")))
    network, x = load(tmp_path / "plain").model.layers[1].mlp, torch.randn(3, SIZES["hidden_size"])
    up, down = (tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("up", "down"))
    torch.testing.assert_close(network(x), (x @ up.T).clamp(min=0).square() @ down.T)
    diffquant.export(tmp_path / "low", tmp_path / "out")
    assert diffquant.verify(tmp_path / "out", tmp_path / "low").passed


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ({"weights": "4:tensor"}, UsageError, r"span all experts of .*layers\.1\.mlp\.experts\.gate_up_proj"),
        ({"weights": "4:g64"}, GroupSizeError, "input width of 3 tensors.*their widths are 96: use g16, g32"),
        (
            {"weights": "4:g32", "rounding": "gptq"},
            UsageError,
            r"gptq' needs the inputs of Linears.*experts\.down_proj",
        ),
    ],
)
def test_what_experts_cannot_be_is_refused_by_name(checkpoint, recipe, error, message):
    with pytest.raises(error, match=message):
        plan_quantization(open_source(checkpoint), Recipe.parse(recipe))


def test_experts_stored_with_their_inputs_first_are_refused_by_name(tmp_path):
    write_random(tmp_path / "plain", MIXTURE | {"is_transposed": True}, torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"2 weights .*\[in, out\].*layers\.1\.mlp\.experts\.down_proj \[5, 96, 64\]"
    ):
        plan_quantization(open_source(tmp_path / "plain"), Recipe.of(weights="4:g32"))
    kept = Recipe.of(weights="4:g32", overrides={"*.down_proj": "16"})
    assert not torch.equal(logits(tmp_path / "plain", kept), logits(tmp_path / "plain"))


@pytest.mark.parametrize("weights", [None, "4:g32"], ids=["plain", "quantized"])
def test_it_is_exported_and_verified_by_three_files(checkpoint, tmp_path, weights):
    source = checkpoint
    if weights:
        source = tmp_path / "low"
        quantize(checkpoint, source, Recipe.of(weights=weights))
    diffquant.export(source, tmp_path / "out", kv=8)
    found = diffquant.verify(tmp_path / "out", source)
    assert found.passed
    assert len(found.stages) == SIZES["num_hidden_layers"] + 2
    known = files_that_know("tests.support.mixture|class Mixture(?!OfExperts)")
    assert known == {"mixture_adapter.py", "mixture.py", "mixture_export.py"}


def test_an_expert_that_the_graph_has_in_anothers_place_is_refused(checkpoint, tmp_path):
    diffquant.export(checkpoint, tmp_path / "out")
    planted = PlantedExport.copy(tmp_path / "out", tmp_path / "planted")
    (number,) = (each for each in planted.model.graph.initializer if each.name == "expert.1")
    number.CopyFrom(numpy_helper.from_array(np.array(0), "expert.1"))
    planted.save()
    with pytest.raises(ToleranceError, match=r"diverges first in layer 1"):
        diffquant.verify(planted.folder, checkpoint)


def files_that_know(pattern):
    """Names of the product's files, and of the tests' support, that mention a toy."""
    paths = (
        path for folder in ("diffquant", "export", "calib", "tests/support") for path in (ROOT / folder).rglob("*.py")
    )
    return {path.name for path in paths if re.search(pattern, path.read_text(encoding="utf-8"))}


def test_an_architecture_of_known_blocks_is_exported_by_the_two_files_that_run_it(tmp_path):
    """It has no experts: the mixture's own files are what an arrangement of a Transformer's blocks takes."""
    write_random(tmp_path / "plain", MIXTURE | {"dense_layers": SIZES["num_hidden_layers"]}, torch.bfloat16)
    tiny_lm.tokenizer().save_pretrained(tmp_path / "plain")
    diffquant.export(tmp_path / "plain", tmp_path / "out", weights="8:g32")
    assert diffquant.verify(tmp_path / "out", tmp_path / "plain").passed


def test_a_block_that_no_file_exports_is_refused_by_name(checkpoint, tmp_path, monkeypatch):
    monkeypatch.delattr(ExpertsBlock, "export")
    refusal = "mixture model with layers of attention, attention with experts: export .* no export for ExpertsBlock"
    with pytest.raises(CheckpointError, match=refusal):
        diffquant.export(checkpoint, tmp_path / "out")


def test_a_block_that_computes_something_else_does_not_inherit_an_export():
    own = {"parameter_specs": lambda _: {}}
    assert type("Other", (MLPBlock,), {})(1, 1, "silu").export_function == MLPBlock.export
    assert type("Changed", (MLPBlock,), own)(1, 1, "silu").export_function == ""


def test_the_verb_that_knows_a_transformers_blocks_alone_says_so(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="mixture model with layers of attention, attention with experts"):
        diffquant.calibrate(checkpoint, tmp_path / "out")
