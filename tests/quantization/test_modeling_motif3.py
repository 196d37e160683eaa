"""The modelling file of Motif-3 against its formulas, and what of a folder's packed experts it reads."""

import json

import pytest
import torch
from safetensors.torch import load_file

import diffquant
from diffquant.quantization.modeling_motif3 import Motif3ForCausalLM
from tests.support.checkpoints import MOTIF3, write_checkpoint, write_random
from tests.support.models import random_ids
from tests.support.motif3 import WINDOW, Formulas
from tests.support.tables import in_one_test

CLOSE = 1e-4
LENGTH = 11
IDS = random_ids(batch=1, length=LENGTH)
# Groups of 32 divide these widths.
WIDE = {"hidden_size": 32, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A 16-bit folder, and the formulas' logits of IDS."""
    root = tmp_path_factory.mktemp("motif3")
    write_random(root / "model", MOTIF3, torch.float64)
    diffquant.quantize(root / "model", root / "out", {"weights": "16"})
    formulas = Formulas(load_file(root / "out/model.safetensors"))
    return root / "out", torch.from_numpy(formulas.logits(IDS[0].tolist())).float()


@pytest.fixture(scope="module")
def model(written):
    return Motif3ForCausalLM.from_pretrained(written[0], dtype=torch.float32).eval()


@in_one_test("pieces", [[LENGTH], [1, 6, 1, 3], [5, 6], [1] * LENGTH])
@in_one_test("padding", [0, 4])
@in_one_test("attention", ["sdpa", "eager"])
def test_logits_are_those_of_the_formulas(written, model, pieces, padding, attention):
    model.set_attn_implementation(attention)
    mask = torch.cat([torch.zeros(1, padding, dtype=torch.long), torch.ones_like(IDS)], 1)
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), IDS], 1)
    cache, logits, read = None, [], 0
    for part in padded.split([padding + pieces[0], *pieces[1:]], 1):
        read += part.shape[1]
        output = model(part, attention_mask=mask[:, :read], past_key_values=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1)[0, padding:], written[1], rtol=0, atol=CLOSE)
    assert {layer.keys.shape[2] for layer in cache.layers} == {padding + LENGTH, WINDOW - 1}


def test_beams_are_those_that_are_found_without_a_cache(model):
    ids = random_ids(batch=2, length=9)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    found = [model.generate(ids, **asked, pad_token_id=0, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)


def test_a_saved_model_is_the_model_without_what_predicts_further_tokens(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert {name: config[name] for name in ("sliding_window", "num_nextn_predict_layers")} == {
        "sliding_window": MOTIF3["sliding_window"],
        "num_nextn_predict_layers": 0,
    }
    saved = diffquant.load(tmp_path / "saved", dtype="float32")
    torch.testing.assert_close(saved(IDS).logits, model(IDS).logits, rtol=0, atol=CLOSE)


def test_what_diffquant_keeps_in_float32_stays_in_float32(written):
    states = (
        each.state_dict()
        for each in (
            Motif3ForCausalLM.from_pretrained(written[0], dtype=torch.bfloat16),
            diffquant.load(written[0], dtype="bfloat16"),
        )
    )
    ours, theirs = ({name for name, x in state.items() if x.dtype == torch.float32} for state in states)
    assert ours == theirs


@in_one_test("scheme", ["3:g32", "5:row", "8:row", "e4m3:row", "e4m3:b16", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
def test_experts_are_decoded_to_what_their_codes_say(tmp_path, scheme):
    source = write_checkpoint(tmp_path / "model", "motif3", **WIDE)
    recipe = {"weights": "16", "overrides": {"*.experts.*": scheme, "*.self_attn.wo": "8:row"}, "rounding": "nearest"}
    diffquant.quantize(source, tmp_path / "out", recipe)
    model, ours = Motif3ForCausalLM.from_pretrained(tmp_path / "out"), diffquant.load(tmp_path / "out")
    for layer in range(1, MOTIF3["num_hidden_layers"]):
        for name in ("gate_up_proj", "down_proj"):
            packed = model.get_submodule(f"model.layers.{layer}.moe.experts.{name}")
            decoded = torch.stack([packed[expert] for expert in range(MOTIF3["num_experts"])])
            wanted = ours.get_parameter(f"model.layers.{layer}.moe.experts.{name}")
            assert torch.equal(decoded.to(model.dtype), wanted.to(model.dtype))


def test_gradients_pass_packed_experts(tmp_path):
    source = write_checkpoint(tmp_path / "model", "motif3")
    diffquant.quantize(source, tmp_path / "out", {"weights": "4:row", "rounding": "nearest"})
    model = Motif3ForCausalLM.from_pretrained(tmp_path / "out")
    with torch.enable_grad():
        model(IDS, labels=IDS).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0
