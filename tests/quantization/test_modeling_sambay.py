"""The modelling file of Phi-4-mini-flash: caches, padding, what it refuses, and the code that folders carry."""

import json
from importlib import import_module

import pytest
import torch
from transformers import CompressedTensorsConfig
from transformers.cache_utils import DynamicCache

import diffquant
from diffquant.errors import CheckpointError
from diffquant.model.adapters import adapter_for
from diffquant.quantization.engine_folder import MODELLING_FILES
from diffquant.quantization.foreign_code import check_no_foreign_code
from diffquant.quantization.modeling_sambay import SambaYCache, SambaYForCausalLM
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.decoding import check_padding, check_pieces
from tests.support.models import random_ids
from tests.support.tables import in_one_test

# Sums run in another order.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sambay")
    checkpoint = write_checkpoint(root / "model", "phi4flash")
    edit_json(checkpoint / "config.json", auto_map={"AutoModelForCausalLM": "modeling_phi4flash.Phi4Flash"})
    (checkpoint / "modeling_phi4flash.py").write_text("raise SystemExit('not this one')")
    diffquant.quantize(checkpoint, root / "out", {"weights": "16", "kv": "8"})
    return root / "out"


def opened(folder, **changes):
    model = SambaYForCausalLM.from_pretrained(folder, **changes).eval()
    model.new_cache = lambda: SambaYCache(model.config)
    return model


@in_one_test("window", [6, 1, 40, None])
def test_texts_are_read_in_pieces_and_with_padding_anywhere(folder, window):
    model = opened(folder, sliding_window=window)
    check_pieces(model, random_ids(batch=2, length=23), [1, 9, 1, 12], CLOSE)
    check_padding(model, random_ids(batch=1, length=17)[0], CLOSE)


def test_windowed_layers_keep_what_the_next_token_sees(folder):
    cache = opened(folder)(random_ids(batch=2, length=23), use_cache=True).cache
    windowed, full = cache.layers[1], cache.layers[-1]
    assert [part.shape[2] for part in (*windowed.kept, *full.kept)] == [5, 5, 23, 23]
    assert cache.get_seq_length() == 23


def test_beams_are_those_that_are_found_without_a_cache(folder):
    model, ids = opened(folder), random_ids(batch=2, length=9)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    found = [model.generate(ids, **asked, pad_token_id=0, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)


def test_what_mamba_cannot_read_is_refused(folder):
    model, ids = opened(folder), random_ids(batch=1, length=6)
    for given in ({"attention_mask": torch.ones(1, 1, 6, 6)}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}):
        with pytest.raises(ValueError, match="sequences as rows of a batch"):
            model(ids, **given)
    with pytest.raises(ValueError, match="DynamicCache does not hold Mamba's states"):
        model(ids, cache=DynamicCache())


def test_parameters_of_exponentials_stay_in_float32(folder):
    model, ids = opened(folder, dtype=torch.bfloat16), random_ids()
    wide = {
        name.split(".attn.")[-1] for name, parameter in model.named_parameters() if parameter.dtype == torch.float32
    }
    assert {"A_log", "D", "inner_cross_attn.lambda_q1"} < wide
    assert not {"in_proj.weight", "Wqkv.weight"} & wide
    exact, ours = (diffquant.load(folder, {"kv": 16}, dtype=dtype)(ids).logits for dtype in ("float32", "bfloat16"))
    errors = [(logits.float() - exact).abs().mean() for logits in (model(ids).logits, ours)]
    assert errors[0] < 1.5 * errors[1]


@in_one_test("dequantize", [False, True])
def test_packed_weights_let_gradients_through_whatever_dtype_they_are_unpacked_to(tmp_path, dequantize):
    recipe = {"weights": "4:row", "overrides": {} if dequantize else {"*.dt_proj": "8:row"}}
    diffquant.quantize(write_checkpoint(tmp_path / "model", "phi4flash"), tmp_path / "out", recipe)
    given = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if dequantize else {}
    model, ids = SambaYForCausalLM.from_pretrained(tmp_path / "out", **given), random_ids()
    wanted = diffquant.load(tmp_path / "out", dtype="float32")(ids).logits
    assert (model(ids).logits.float() - wanted).abs().mean() < 0.1 * wanted.abs().mean()
    scale = model.model.layers[0].mlp.fc1.weight.new_ones(()).requires_grad_()
    model.requires_grad_(False)
    model.model.layers[0].mlp.fc1.register_forward_hook(lambda *called: called[-1] * scale)
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert scale.grad.abs() > 0


@in_one_test("what", ["nothing", "code", "the other file"])
def test_only_this_files_text_is_trusted(tmp_path, what):
    diffquant.quantize(write_checkpoint(tmp_path / "model", "phi4flash"), tmp_path / "out", {"weights": "4:row"})
    config = json.loads((tmp_path / "out/config.json").read_text())
    asked = tmp_path / "out", config, adapter_for(config)
    if what == "nothing":
        check_no_foreign_code(*asked)
        return
    with (tmp_path / "out" / ("modeling_sambay.py" if what == "code" else "modeling_diffquant.py")).open("a") as file:
        file.write("\n")
    with pytest.raises(CheckpointError, match="code that is not this version of diffquant's"):
        check_no_foreign_code(*asked)


def test_the_folder_replaces_the_authors_code_and_is_quantized_again(folder, tmp_path):
    assert [file.name for file in folder.glob("*.py")] == ["modeling_sambay.py"]
    assert "modeling_sambay.py replaces `modeling_phi4flash.py`" in (folder / "README.md").read_text()
    report = diffquant.quantize(folder, tmp_path / "again", {"weights": "4:row"})
    assert "left out" not in str(report)
    assert [file.name for file in (tmp_path / "again").glob("*.py")] == ["modeling_sambay.py"]
    assert "with this folder's modeling_sambay.py" in (tmp_path / "again/README.md").read_text()


def test_an_auto_map_names_classes_that_are_there():
    for file, prefix in MODELLING_FILES.items():
        module = import_module(f"diffquant.quantization.{file.removesuffix('.py')}")
        assert all(hasattr(module, prefix + name) for name in ("Config", "Model", "ForCausalLM"))
