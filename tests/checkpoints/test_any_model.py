"""Checkpoints of an architecture that is not run: their weights are chosen by name, and packed like any other's."""

import json
import subprocess
import sys

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, BartConfig, T5Config

from diffquant.checkpoints.compressed_tensors import PACKED, SCALE, SHAPE, packed_shapes, unpack_parts, unpack_weight
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.weight_source import PackingRules, open_weights
from diffquant.errors import CheckpointError, GroupSizeError, NonFiniteError, UnknownModelTypeError, UsageError
from diffquant.quantization.loading import load
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from tests.support import unknown_model
from tests.support.checkpoints import contents, write_checkpoint, write_diffllama
from tests.support.packed_folders import edit_tensors
from tests.support.tables import in_one_test
from tests.support.unknown_model import linears, write_unknown

_SEQ2SEQ = {"vocab_size": 96, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
_SEQ2SEQ |= {"decoder_ffn_dim": 64, "decoder_start_token_id": 0}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KILLING_RUN = """
import os, signal, sys
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.checkpoints.weight_source import open_weights

def kill(done, total, what):
    if done > 0.6 * total:
        os.kill(os.getpid(), signal.SIGKILL)

quantize(open_weights(sys.argv[1]), sys.argv[2], Recipe.of(weights="4:g32"), progress=kill)
"""


@pytest.fixture
def source(tmp_path):
    write_unknown(tmp_path / "source")
    return tmp_path / "source"


def written_tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def packed_modules_of(folder):
    return {name.removesuffix(PACKED) for name in written_tensors(folder) if name.endswith(PACKED)}


def expected_modules(tensors):
    """The matrices [out, in] that are packed, by the module that each becomes."""
    packed = {n: x for n, x in tensors.items() if n.removesuffix(".weight").split(".", 3)[-1] in unknown_model.PACKED}
    return {module: matrix for name, x in packed.items() for module, matrix in linears(name, x).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shards", "tied"), [(1, False), (3, True)], ids=["one file", "shards, tied"])
def test_every_packed_weight_is_within_half_a_step_and_the_rest_is_unchanged(tmp_path, dtype, shards, tied):
    tensors = write_unknown(tmp_path / "source", dtype, shards, tied)
    quantize(open_weights(tmp_path / "source"), tmp_path / "out", Recipe.of(weights="4:g32"))
    written = written_tensors(tmp_path / "out")
    modules = expected_modules(tensors)
    assert packed_modules_of(tmp_path / "out") == modules.keys()
    assert len(modules) == 24 + 2 * 3 * unknown_model.EXPERTS
    for name in [name for name in tensors if not linears(name, tensors[name]).keys() <= modules.keys()]:
        assert written[name].dtype == tensors[name].dtype
        assert torch.equal(written[name], tensors[name])
    for module, tensor in modules.items():
        assert written[module + SHAPE].tolist() == list(tensor.shape)
        codes = unpack_from_int32(written[module + PACKED], 4, tensor.shape)
        step = written[module + SCALE].double().repeat_interleave(32, -1)
        # Half a step, and what rounding the scale to 16 bits puts beyond the largest code.
        assert ((codes * step - tensor.double()).abs() <= step * (0.5 + 7 * 2**-8)).all()


@pytest.mark.parametrize("text", ["4:g32", "6:row", "8:g32"])
@pytest.mark.parametrize("rounding", ["nearest", "mse"])
def test_each_expert_is_rounded_as_it_would_be_alone(tmp_path, source, text, rounding):
    recipe = Recipe.of(weights=text, rounding=rounding)
    quantize(open_weights(source), tmp_path / "out", recipe)
    (tmp_path / "alone").mkdir()
    modules = expected_modules(load_file(source / "model.safetensors"))
    alone = {f"{module}.weight": x.contiguous() for module, x in modules.items() if ".experts." in module}
    assert len(alone) == 2 * 3 * unknown_model.EXPERTS
    save_file(alone, tmp_path / "alone/model.safetensors")
    (tmp_path / "alone/config.json").write_text("{}")
    quantize(open_weights(tmp_path / "alone"), tmp_path / "out-alone", recipe)
    whole, parts = written_tensors(tmp_path / "out"), written_tensors(tmp_path / "out-alone")
    assert len(parts) == 3 * len(alone)
    assert all(torch.equal(whole[name], part) for name, part in parts.items())
    for name, expert in alone.items():
        module = name.removesuffix(".weight")
        decoded = unpack_weight(*(whole[module + suffix] for suffix in (PACKED, SCALE, SHAPE)), recipe.weights)
        assert decoded.shape == expert.shape
        assert (decoded - expert.float()).square().mean() < 0.02 * expert.float().square().mean()


def test_other_rules_do_not_take_over_a_killed_runs_shards(tmp_path):
    write_unknown(tmp_path / "source", shards=4)
    subprocess.run([sys.executable, "-c", KILLING_RUN, tmp_path / "source", tmp_path / "out"], check=False)
    rules = PackingRules.read(keep=("*wo.weight",))
    report = quantize(open_weights(tmp_path / "source", rules), tmp_path / "out", Recipe.of(weights="4:g32"))
    assert report.resumed == 0


def test_the_command_line_chooses_by_name_where_the_architecture_is_unknown(tmp_path, source, run):
    code, out, err = run("quantize", source, "-o", tmp_path / "out", "--weights", "4:g32", "--dry-run")
    assert code == 0
    assert "note: model_type 'latent-mixture' is not supported" in err
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert "4:g32" in rows["model.layers.*.mlp.experts.gate_up_proj"]
    assert "16" in rows["model.layers.*.self_attn.lambda_proj.weight"]
    assert not (tmp_path / "out").exists()


def test_weights_of_a_known_architecture_are_the_same_by_name(tmp_path, run):
    """The rules that ship choose of a DiffLlama what its adapter does."""
    folder = write_diffllama(tmp_path / "source")
    assert run("quantize", folder, "-o", tmp_path / "known", "--weights", "4:g32", "--dtype", "float32")[0] == 0
    assert run("quantize", folder, "-o", tmp_path / "named", "--weights", "4:g32", "--weights-only")[0] == 0
    by_name, known = contents(tmp_path / "named"), contents(tmp_path / "known")
    assert by_name["model.safetensors"] == known["model.safetensors"]
    assert load(tmp_path / "named").config == load(tmp_path / "known").config


def test_weights_of_a_folder_with_our_modelling_file_are_chosen_by_name_without_it(tmp_path):
    unilm = write_checkpoint(tmp_path / "unilm", "unilm-v2", torch.bfloat16)
    source = quantize(open_source(unilm), tmp_path / "source", Recipe.of(kv="8:row")).destination
    assert (source / "modeling_diffquant.py").exists()
    rules = PackingRules.read(None, ("*.q_proj.weight",))
    folder = quantize(open_weights(source, rules), tmp_path / "out", Recipe.of(weights="4:g32")).destination
    assert not list(folder.glob("*.py"))
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    load(folder)


def test_patterns_to_keep_and_overrides_change_the_choice(tmp_path, source):
    override = {"*.lambda_proj": "8:row", "*.wo": "8:row"}
    quantize(
        open_weights(source, PackingRules.read(keep=("*.0.SELF_ATTN.wo*", "*shared_expert*"))),
        tmp_path / "out",
        Recipe.of(weights="4:g32", overrides=override),
    )
    packed = open_weights(tmp_path / "out").packed
    assert "model.layers.1.mlp.shared_expert.up_proj" not in packed
    assert str(packed["model.layers.1.self_attn.lambda_proj"]) == "8:row"
    assert str(packed["model.layers.1.self_attn.wo"]) == "8:row"


def test_rules_of_ones_own_replace_the_sections_they_have(tmp_path, source, run):
    (tmp_path / "rules.yaml").write_text("linears: ['*.wo.weight']\nexperts: []\n")
    out = tmp_path / "out"
    assert run("quantize", source, "-o", out, "--weights", "4:g32", "--weight-rules", tmp_path / "rules.yaml")[0] == 0
    assert packed_modules_of(out) == {f"model.layers.{layer}.self_attn.wo" for layer in range(3)}
    assert json.loads((out / "diffquant.json").read_text())["rules"]["linears"] == ["*.wo.weight"]


@in_one_test(
    ("text", "complaint"),
    [
        ("keeps: []", "unknown section 'keeps'; did you mean 'keep'"),
        ("keep: '*'", "keep must be a list of patterns, got '\\*'"),
        ("keep: {norms: [1]}", "keep: norms must be a list of patterns"),
        ("- a", "must be a mapping of linears, experts, keep"),
        ("keep: [", "cannot read weight rules"),
    ],
)
def test_malformed_rules_are_refused(tmp_path, text, complaint):
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        PackingRules.read(tmp_path / "rules.yaml")


def test_inspect_says_what_names_and_shapes_say(tmp_path, source, run):
    said = json.loads(run("inspect", source, "--json")[1])
    tensors = written_tensors(source)
    assert (said["model_type"], said["tensors"]) == ("latent-mixture", len(tensors))
    assert said["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert (said["weights"], said["experts"]) == (28, 4)
    quantize(open_weights(source), tmp_path / "out", Recipe.of(weights="4:g32"))
    size = sum(tensor.nbytes for tensor in written_tensors(tmp_path / "out").values())
    assert said["sizes"]["4:g32"] == size
    assert f"{len(expected_modules(tensors))} weights are packed" in run("inspect", tmp_path / "out")[1]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("verb", ["load", "sweep", "export"])
def test_what_would_run_it_refuses_and_says_what_works(tmp_path, source, run, verb, quantized):
    if quantized:
        quantize(open_weights(source), tmp_path / "low", Recipe.of(weights="4:g32"))
    folder = tmp_path / "low" if quantized else source
    message = "'latent-mixture' is not supported.*`quantize` packs them with weights_only=True, but diffquant"
    if verb == "load":
        with pytest.raises(UnknownModelTypeError, match=message):
            load(folder)
        return
    code, _, err = run(verb, folder, "-o", tmp_path / "out")
    assert code == 1
    assert "'latent-mixture' is not supported" in err


def refused(source, recipe, rules=None):
    return plan_quantization(open_weights(source, rules), recipe)


def test_a_checkpoint_without_weights_is_refused(tmp_path, source):
    with pytest.raises(CheckpointError, match=r"no tensor of .* would be packed: \d+ of \d+ are weights by"):
        refused(source, Recipe.of(weights="4:g32"), PackingRules.read(keep=("*",)))


def test_one_scale_for_all_experts_is_refused(source):
    with pytest.raises(UsageError, match=r"span all experts of .*experts\.gate_up_proj.*; use a group"):
        refused(source, Recipe.of(weights="8:tensor"))


def test_blocks_that_would_span_two_experts_are_refused(source):
    with pytest.raises(GroupSizeError, match=r"span two experts, .*gate_up_proj \[5, 192, 64\].*; use a group or row"):
        refused(source, Recipe.of(weights="e4m3:b128"))


def test_what_needs_a_model_that_runs_is_refused(source):
    with pytest.raises(UsageError, match="cannot be run: k, v, logits cannot be quantized"):
        refused(source, Recipe.of(weights="4:g32", kv=8, logits=8))
    with pytest.raises(UsageError, match="rounding='gptq' runs the model"):
        refused(source, Recipe.of(weights="4:g32", rounding="gptq"))


@in_one_test("scheme", ["16", "8:row"])
def test_a_weight_that_is_called_as_a_cache_is_named_by_a_pattern_that_means_it(tmp_path, scheme):
    """T5 calls its projections q, k, v and o."""
    folder, stem = tmp_path / "t5", "encoder.block.0.layer.0.SelfAttention"
    folder.mkdir()
    save_file({f"{stem}.{name}.weight": torch.randn(64, 64) for name in "qkvo"}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UsageError, match=r"'\*\.k' ends in .k and so refers to the k of layers.*write '\*\.\[k\]'"):
        refused(folder, Recipe.of(weights="4:g32", overrides={"*.k": scheme}))
    quantize(open_weights(folder), tmp_path / "out", Recipe.of(weights="4:g32", overrides={"*.[k]": scheme}))
    packed = open_weights(tmp_path / "out").packed
    assert str(packed.get(f"{stem}.k", "16")) == scheme
    assert str(packed[f"{stem}.v"]) == "4:g32"


@in_one_test("config", [T5Config(**_SEQ2SEQ, d_kv=2, d_ff=64, num_layers=1, num_heads=32), BartConfig(**_SEQ2SEQ)])
def test_embeddings_that_are_called_shared_are_no_linears(tmp_path, config):
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    plan = plan_quantization(open_weights(tmp_path / "source"), Recipe.of(weights="8:row"))
    of_transformers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(plan.schemes) == of_transformers - {"lm_head"}


@in_one_test("name", ["gpt_neox.embed_in", "transformer.wte", "model.language_model.embed_tokens", "shared"])
def test_an_override_that_packs_an_embedding_is_refused_whatever_its_name(tmp_path, name):
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({f"{name}.weight": torch.randn(64, 64)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "another"}')
    with pytest.raises(UsageError, match=f"{name} would be packed, and compressed-tensors' readers cannot"):
        refused(folder, Recipe.of(overrides={name: "8:row"}))


def test_a_pattern_that_keeps_nothing_is_refused(source):
    with pytest.raises(UsageError, match=r"match no tensor of .*'\*self_attn\.wq_c\.weight' \(the nearest is '.*"):
        open_weights(source, PackingRules.read(keep=("*self_attn.wq_c.weight",)))


def test_names_that_would_meet_in_the_output_are_refused(source):
    edit_tensors(source, {"model.layers.0.self_attn.wo.weight_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"wo\.weight_scale would be written twice"):
        refused(source, Recipe.of(weights="4:g32"))


def test_integers_are_carried_over(tmp_path, source):
    edit_tensors(source, {"model.layers.0.table": torch.arange(6).reshape(2, 3)})
    quantize(open_weights(source), tmp_path / "out", Recipe.of(weights="4:g32"))
    assert torch.equal(open_checkpoint(tmp_path / "out").read("model.layers.0.table"), torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str)
def test_floats_of_8_bits_are_carried_over_and_nan_among_them_is_refused(tmp_path, source, dtype):
    table = torch.tensor([[0.5, 2.0, 4.0]]).to(dtype)
    edit_tensors(source, {"model.layers.0.table": table})
    quantize(open_weights(source), tmp_path / "out", Recipe.of(weights="4:g32"))
    carried = written_tensors(tmp_path / "out")["model.layers.0.table"]
    assert carried.dtype == dtype
    assert torch.equal(carried.float(), table.float())
    table.view(torch.uint8)[0, 1] = 0xFF
    edit_tensors(source, {"model.layers.0.table": table})
    with pytest.raises(NonFiniteError, match=r"layers\.0\.table.*at \[0, 1\]"):
        quantize(open_weights(source), tmp_path / "again", Recipe.of(weights="4:g32"))


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4", "mxfp8", "e4m3:channel", "e4m3:b32"])
def test_experts_and_linears_are_packed_as_floats_whatever_the_blocks(tmp_path, source, monkeypatch, text):
    scheme = Scheme.parse(text, target="weights")
    quantize(open_weights(source), tmp_path / "out", Recipe.of(weights=text))
    whole, plain = written_tensors(tmp_path / "out"), load_file(source / "model.safetensors")
    packed = open_weights(tmp_path / "out").packed
    assert set(packed.values()) == {scheme}
    modules = expected_modules(plain)
    assert packed.keys() == modules.keys()
    for module, tensor in modules.items():
        parts = {suffix: whole[module + suffix] for suffix in packed_shapes(tuple(tensor.shape), scheme)}
        decoded = unpack_parts(parts, tensor.shape, scheme)
        share = {"nvfp4": 0.015, "mxfp4": 0.03}.get(text, 0.002)
        assert (decoded - tensor.float()).square().mean() < share * tensor.float().square().mean()
    monkeypatch.setattr("diffquant.checkpoints.row_stream.BLOCK_ELEMENTS", 7 * 64)
    quantize(open_weights(source), tmp_path / "blocks", Recipe.of(weights=text))
    assert contents(tmp_path / "out")["model.safetensors"] == contents(tmp_path / "blocks")["model.safetensors"]
