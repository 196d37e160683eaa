"""The whole path of every source at awkward sizes: inspect, quantize, load, perplexity, export, verify, perplexity."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from diffquant import Recipe, data, load, quantize
from diffquant.errors import CheckpointError
from diffquant.measure.tasks.perplexity import compute_perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.runtime.scoring import OnnxRuntime
from diffquant.quantization.inspection import inspect_checkpoint
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

TEXT = data.books_text()[5000:5400]
# Widths that no power of two divides, three KV pairs, groups of 3 signal heads.
AWKWARD = {"vocab_size": tiny_lm.WORDS, "hidden_size": 144, "intermediate_size": 208, "num_hidden_layers": 3}
AWKWARD |= {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16, "max_position_embeddings": 224}
AWKWARD |= {"initializer_range": 0.1}
LATENTS = {"q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 8}
SOURCES = {
    "diffllama": {},
    "llama": {"num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": True},
    "unilm-v1": {},
    "unilm-v2": {"num_key_value_heads": 3},
    "motif": {"use_bias": False, "tie_word_embeddings": True},
    "motif-grouped": {"num_attention_heads": 12, "num_noise_heads": 3},
    "gated": {},
    "phi4flash": {"num_hidden_layers": 8, "head_dim": 12},
    # Six groups of two signal heads and a noise head.
    "motif3": {"num_attention_heads": 18, "num_noise_heads": 6, "moe_intermediate_size": 16} | LATENTS,
}
# Weights of two in each gated network, three in each Mamba, two in each other mixer.
# Of Motif-3 five in each attention, three in the dense network, five in each of experts.
PACKED = dict.fromkeys(SOURCES, 3 * 7) | {"phi4flash": 8 * 2 + 3 * 3 + 5 * 2, "motif3": 3 * 5 + 3 + 2 * 5}


@pytest.mark.parametrize("source", sampled(SOURCES, 3))
def test_a_source_goes_the_whole_way(source, tmp_path):
    plain, low, onnx = (tmp_path / name for name in ("plain", "low", "onnx"))
    write_checkpoint(plain, source, **AWKWARD | SOURCES[source])
    tiny_lm.tokenizer().save_pretrained(plain)
    tensors = inspect_checkpoint(plain)

    quantize(plain, low, Recipe.of(weights="4:g16"))
    packed = inspect_checkpoint(low)
    assert (packed.spec, packed.layers, packed.packed) == (tensors.spec, tensors.layers, PACKED[source])
    assert packed.sizes["as it is"] < 0.6 * tensors.sizes["as it is"]

    model = load(low, dtype=torch.float32)
    ids = torch.tensor([0, *tiny_lm.tokenizer().encode(TEXT)])
    nll = cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]).item()
    score = compute_perplexity(TorchModel(model, tiny_lm.tokenizer()), TEXT, window=224, stride=224)
    assert score["perplexity"] == pytest.approx(math.exp(nll), rel=1e-4)

    export(low, onnx, ExportOptions.parse(accuracy_level=1))
    assert next(iter(verify(onnx, low, tolerance=1e-4).tokens.values())).agreement == 1.0
    exported = compute_perplexity(OnnxRuntime().open(onnx, "cpu"), TEXT, window=224, stride=224)
    assert exported["perplexity"] == pytest.approx(score["perplexity"], rel=1e-3)


def test_heads_of_a_width_that_group_query_attention_refuses_run_in_the_body_too(tmp_path, monkeypatch):
    from diffquant.onnx.runtime import session

    monkeypatch.setattr(session, "library_path", lambda: None)
    source = write_checkpoint(tmp_path / "source", "motif-grouped", head_dim=12)
    export(source, tmp_path / "onnx", ExportOptions())
    assert next(iter(verify(tmp_path / "onnx", source, tolerance=1e-4).tokens.values())).agreement == 1.0


WRONG = {
    "odd heads": ("diffllama", {"num_attention_heads": 9}, "num_attention_heads is 9"),
    "odd key heads": ("unilm-v1", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    "indivisible groups": ("motif-grouped", {"num_noise_heads": 3}, "num_noise_heads 3 does not divide"),
    "unknown activation": ("motif", {"hidden_act": "poly"}, "hidden_act is 'poly'"),
    "fused rotation": ("motif-grouped", {"fused_rope": True}, "fused_rope is True"),
    "stretched rotation": ("motif", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling .* 'yarn'"),
    "a window": ("motif", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window is 64"),
    "layers with windows": ("llama", {"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention"),
}


@in_one_test("name", WRONG)
def test_a_wrong_config_is_refused_naming_its_key(name, tmp_path):
    from tests.support.checkpoints import edit_json

    source, changes, message = WRONG[name]
    folder = write_checkpoint(tmp_path / "source", source)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(folder)
