"""Folders that diffquant writes open in transformers alone, and compute there what diffquant computes."""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from transformers import DiffLlamaForCausalLM

import diffquant
from diffquant.errors import CheckpointError
from diffquant.model.adapters import adapter_for
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.quantization import modeling_diffquant
from diffquant.quantization.engine_folder import config_for_engines, make_modelling_text
from tests.support import tiny_lm
from tests.support.checkpoints import MOTIF, NATIVE, PHI4FLASH, SIZES, UNILM, edit_json, write_checkpoint
from tests.support.models import random_ids
from tests.support.tables import in_one_test
from tests.support.thorough import thorough
from tests.vllm.answers import record

SOURCES = ["diffllama", *UNILM, *MOTIF, *NATIVE, *PHI4FLASH, "motif3"]
MODELLING_FILE = "modeling_diffquant.py"
# Those of models with layers of their own.
OTHER_FILES = {"phi4flash": "modeling_sambay.py", "motif3": "modeling_motif3.py"}
RECIPES = {"16": {"kv": "8:row"}, "8": {"weights": "8:row"}, "4": {"weights": "4:row"}}
STATIC = {"kv": "e4m3:static"}
CALIBRATED = {"diffllama": "4", "unilm-v2": "16"}
CONFIGS = {"diffllama": SIZES | {"model_type": "diffllama"}, **UNILM, **MOTIF}
# One recipe of each source in turn, and what is read batched; others are thorough.
WHOLE = ["diffllama", "unilm-v2", *OTHER_FILES]
QUICK = [*product(WHOLE, ["16"]), ("phi4flash", "8"), *zip(SOURCES, cycle(["4", "8"]), strict=False)]
REST = [pair for pair in product(SOURCES, RECIPES) if pair not in QUICK]
# The angles of positions are float32 in both, and sums run in another order.
CLOSE = 1e-4


PLAIN_CACHE = {"kv": 16}


def reference(folder, recipe=PLAIN_CACHE):
    """Logits and tokens of `diffquant.load` without the recipe's cache, which another loader does not have, or with."""
    model = diffquant.load(folder, recipe, dtype="float32")
    ids = random_ids(batch=2, length=21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    torch.save(
        {
            "ids": ids,
            "mask": mask,
            "logits": model(ids).logits,
            "padded": model(ids, attention_mask=mask).logits,
            "tokens": model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0),
        },
        folder / "reference.pt",
    )


def write_quantized(root, pairs):
    """Folders of sources under recipes, each with its reference."""
    folders = {}
    with torch.no_grad():
        for source, bits in pairs:
            checkpoint = root / source
            if not checkpoint.exists():
                write_checkpoint(checkpoint, source)
            folders[source, bits] = root / f"{source}-{bits}"
            diffquant.quantize(checkpoint, folders[source, bits], RECIPES[bits])
            reference(folders[source, bits])
    return folders


def write_calibrated(root):
    """Folders with a cache whose scales are calibrated, which the reference has too."""
    folders = []
    with torch.no_grad():
        for source, bits in CALIBRATED.items():
            checkpoint = write_checkpoint(root / source, source, vocab_size=tiny_lm.WORDS)
            tiny_lm.tokenizer().save_pretrained(checkpoint)
            folders.append(root / f"{source}-low")
            diffquant.quantize(checkpoint, folders[-1], RECIPES[bits] | STATIC)
            reference(folders[-1], None)
    return folders


def write_blocks_of_floats(root):
    """Folders of models in float32 and float16 with scales of 8 bits, which compressed-tensors decodes to bfloat16."""
    folders = []
    for source, scheme, dtype in (
        ("llama", "nvfp4", "float32"),
        ("unilm-v2", "mxfp4", "float32"),
        ("diffllama", "mxfp8", "float16"),
    ):
        checkpoint, folder = write_checkpoint(root / source, source, getattr(torch, dtype)), root / f"{source}-{scheme}"
        diffquant.quantize(checkpoint, folder, {"weights": scheme})
        ids = random_ids(batch=2, length=21)
        logits = diffquant.load(folder, dtype="bfloat16").float()(ids).logits
        torch.save({"ids": ids, "logits": logits}, folder / "reference.pt")
        assert diffquant.load(folder).dtype == getattr(torch, dtype)
        folders.append(folder)
    return folders


def transformers_alone(asked):
    """What each function of tests/serving/alone.py measured of its folders, and what their process wrote to stderr."""
    words = [word for measure, folders in asked.items() for word in (f"--{measure}", *map(str, folders))]
    command = [sys.executable, Path(__file__).parent / "alone.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(words[1]).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        measure: [found[measure][str(folder)] for folder in folders] for measure, folders in asked.items()
    }, done.stderr


@dataclass
class Alone:
    """What transformers alone measured of folders under recipes, and of others by the function; and its stderr."""

    folders: dict
    measured: dict
    calibrated: list
    floats: list
    others: dict
    errors: str


# Importing transformers and compressed-tensors takes longer than all that is measured: one process does.
@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folders = write_quantized(tmp_path_factory.mktemp("folders"), QUICK)
    calibrated = write_calibrated(tmp_path_factory.mktemp("calibrated"))
    floats = write_blocks_of_floats(tmp_path_factory.mktemp("floats"))
    trained = [folders["diffllama", "4"], floats[0]]
    others, errors = transformers_alone(
        {"measured": [*folders.values(), *calibrated], "as_the_card_says": floats, "trained": trained}
    )
    measured = others.pop("measured")
    by_pair = dict(zip(folders, measured, strict=False))
    return Alone(folders, by_pair, measured[len(folders) :], floats, others, errors)


def check_alone(found, source, bits, **of):
    assert found["class"] == OTHER_FILES.get(source, MODELLING_FILE).removesuffix(".py")
    furthest, is_same = max(*found["sdpa"], *found["eager"]), found["tokens None"] and found["tokens static"]
    record("transformers", source, bits, furthest, is_same, **of)
    assert furthest < CLOSE
    assert is_same


@in_one_test(("source", "bits"), QUICK)
def test_a_folder_computes_the_same_in_transformers_alone(alone, source, bits):
    check_alone(alone.measured[source, bits], source, bits)


@thorough
def test_every_source_under_every_recipe_computes_the_same_in_transformers_alone(tmp_path):
    folders = write_quantized(tmp_path, REST)
    measured, _ = transformers_alone({"measured": folders.values()})
    for (source, bits), found in zip(folders, measured["measured"], strict=True):
        check_alone(found, source, bits)
        if bits == "16":
            check_saved(folders[source, bits])


def check_saved(folder):
    """Check the configuration that transformers saved again."""
    before, after = (
        adapter_for(json.loads((folder / place / "config.json").read_text())).architecture for place in (".", "saved")
    )
    if isinstance(before, Motif3Architecture):
        before = replace(before, num_nextn_predict_layers=0)
    assert after == before


@in_one_test("pair", [pair for pair in QUICK if "16" in pair])
def test_a_configuration_that_transformers_saved_again_says_what_the_folder_said(alone, pair):
    check_saved(alone.folders[pair])


@in_one_test(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 3.0] * 4},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
    ],
)
def test_stretched_angles_are_those_of_the_projected_heads(tmp_path, rope):
    stretched = rope | {"rope_theta": 300.0, "original_max_position_embeddings": 8}
    folder = write_checkpoint(tmp_path / "model", "diffllama", rope_parameters=stretched)
    diffquant.quantize(folder, tmp_path / "out", RECIPES["8"])
    ids = random_ids()
    model = modeling_diffquant.DiffForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(model(ids).logits, diffquant.load(tmp_path / "out")(ids).logits, rtol=0, atol=CLOSE)


def test_the_maps_that_are_asked_for_are_those_of_transformers_own_model(tmp_path):
    diffquant.quantize(write_checkpoint(tmp_path / "model", "diffllama"), tmp_path / "out", RECIPES["16"])
    ids, eager = random_ids(), {"attn_implementation": "eager"}
    stock = DiffLlamaForCausalLM.from_pretrained(tmp_path / "model", **eager)(ids, output_attentions=True)
    ours = modeling_diffquant.DiffForCausalLM.from_pretrained(tmp_path / "out", **eager)(ids, output_attentions=True)
    torch.testing.assert_close(ours.attentions, stock.attentions, rtol=0, atol=CLOSE)


@in_one_test("source", ["diffllama", "unilm-v1", "motif"])
def test_lambda_learns_from_the_beginning(source):
    config = modeling_diffquant.DiffConfig(**config_for_engines(CONFIGS[source], adapter_for(CONFIGS[source])))
    model, ids = modeling_diffquant.DiffForCausalLM(config), random_ids()
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    vectors = [parameter for name, parameter in model.named_parameters() if ".lambda_" in name]
    assert vectors
    assert all(vector.grad.abs().max() > 0 for vector in vectors)


def test_lambda_is_as_exact_under_autocast():
    config = modeling_diffquant.DiffConfig(
        **config_for_engines(CONFIGS["diffllama"], adapter_for(CONFIGS["diffllama"]))
    )
    attention = modeling_diffquant.DiffForCausalLM(config).model.layers[0].self_attn
    maps = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    with torch.no_grad():
        plain = attention._difference(*maps, maps[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(attention._difference(*maps, maps[0]), plain)


@in_one_test("source", ["unilm-v2", "phi4flash", "motif3", "llama"])
def test_the_record_has_the_digest_of_the_code_that_travels(tmp_path, source):
    diffquant.quantize(write_checkpoint(tmp_path / "model", source), tmp_path / "out", {"weights": "8:row"})
    code = json.loads((tmp_path / "out/diffquant.json").read_text()).get("code", {})
    travelling = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "out").glob("*.py")}
    assert code == travelling
    assert bool(code) == (source != "llama")


def test_a_strangers_code_is_not_carried_where_ours_serves(tmp_path):
    source = write_checkpoint(tmp_path / "model", "motif")
    (source / MODELLING_FILE).write_text("raise SystemExit('not this one')")
    (source / "modeling_motif.py").write_text("raise SystemExit('nor this')")
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_motif.Motif"})
    diffquant.quantize(source, tmp_path / "out", {"weights": "8:row"})
    assert [file.name for file in (tmp_path / "out").glob("*.py")] == [MODELLING_FILE]
    assert (tmp_path / "out" / MODELLING_FILE).read_text() == make_modelling_text(MODELLING_FILE, "Motif")
    assert "source's own code is not part of this folder" in (card := (tmp_path / "out/README.md").read_text())
    assert "`modeling_motif.py`" in card
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert set(config["auto_map"].values()) == {
        f"modeling_diffquant.{name}" for name in ("DiffConfig", "DiffModel", "DiffForCausalLM")
    }


def test_our_files_name_is_refused_where_ours_does_not_serve(tmp_path):
    source = write_checkpoint(tmp_path / "model", "llama")
    (source / MODELLING_FILE).write_text("pass")
    with pytest.raises(CheckpointError, match=rf"{MODELLING_FILE}.*rename"):
        diffquant.quantize(source, tmp_path / "out", {"weights": "8:row"})
    assert not (tmp_path / "out").exists()


def test_a_converted_folder_opens_too(tmp_path):
    diffquant.convert(write_checkpoint(tmp_path / "model", "llama"), tmp_path / "out", "diff-v2")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["DiffForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (tmp_path / "out" / MODELLING_FILE).read_text() == make_modelling_text(MODELLING_FILE, "diff_v2")
    digest = hashlib.sha256((tmp_path / "out" / MODELLING_FILE).read_bytes()).hexdigest()
    assert json.loads((tmp_path / "out/diffquant.json").read_text())["code"] == {MODELLING_FILE: digest}


# transformers takes most of a minute to end a batch on a processor.
@thorough
def test_requests_batched_by_transformers_give_what_each_gives_alone(alone):
    folders = [alone.folders[source, "16"] for source in ("diffllama", "unilm-v2")]
    measured, _ = transformers_alone({"batched": folders})
    assert all(measured["batched"])


def test_a_calibrated_cache_is_that_of_diffquant_in_transformers_alone(alone):
    """Keys and values are rounded and kept, by whatever name compressed-tensors and transformers call the cache."""
    for (source, bits), found in zip(CALIBRATED.items(), alone.calibrated, strict=True):
        check_alone(found, source, bits, cache=STATIC["kv"])


def test_a_folder_of_low_bit_floats_opens_as_its_card_says(alone):
    for found in alone.others["as_the_card_says"]:
        assert found["dtype"] == "torch.bfloat16"
        assert found["furthest"] < CLOSE


def test_adapters_of_packed_weights_train_as_the_card_says(alone):
    packed = [alone.folders["diffllama", "4"], alone.floats[0]]
    for folder, found in zip(packed, alone.others["trained"], strict=True):
        assert "CompressedTensorsConfig(run_compressed=False)" in (folder / "README.md").read_text()
        assert "no attribute 'weight'" in found.pop("nothing")
        assert all(after < before for before, after in found.values())


def test_what_the_recipe_asks_beyond_weights_is_said_where_it_is_not_honoured(alone):
    assert "k 8:row, v 8:row" in alone.errors
    # What transformers does honour.
    assert not [line for line in alone.errors.splitlines() if "e4m3" in line and "not applied here" in line]


def test_what_a_rank_would_compute_wrongly_has_no_plan_for_ranks():
    """Pairs of heads that lie apart, and the gate that PolyNorm takes means of."""
    configs = {source: config_for_engines(CONFIGS[source], adapter_for(CONFIGS[source])) for source in CONFIGS}
    plans = {
        source: modeling_diffquant.DiffConfig(diff_model=config["diff_model"]).base_model_tp_plan
        for source, config in configs.items()
    }
    assert {source for source, plan in plans.items() if plan is None} == {"diffllama", *MOTIF}
