"""A folder that others quantized goes the whole way as the floats that it holds: scored, exported, compared."""

import pytest
import torch
from safetensors.torch import load_file

import diffquant
from diffquant.measure.tasks.perplexity import compute_perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.runtime.scoring import OnnxRuntime
from diffquant.quantization.inspection import inspect_checkpoint
from diffquant.quantization.loading import load
from tests.checkpoints.test_dequantized import write_nf4
from tests.checkpoints.test_float_sources import write_folder, write_fp8, write_modelopt
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json
from tests.support.packed_folders import edit_tensors, write_packed
from tests.support.thorough import sampled

TEXT = diffquant.data.books_text()[5000:5200]
# What people are told of the codes, and who writes the folder.
SOURCES = {
    "GPTQ 4:g32": lambda folder: write_packed(folder, "gptq"),
    "AWQ 4:g32": lambda folder: write_packed(folder, "awq", "diffllama"),
    "bitsandbytes nf4": write_nf4,
    "compressed-tensors FP8": lambda folder: write_folder(folder, "fp8 of channels", "unilm-v2"),
    "compressed-tensors NVFP4": lambda folder: write_folder(folder, "nvfp4"),
    "compressed-tensors MXFP4": lambda folder: write_folder(folder, "mxfp4", "diffllama"),
    "compressed-tensors int8 per channel": lambda folder: write_folder(folder, "int8 with zero points"),
    "FP8 in blocks of 32x16": write_fp8,
    "ModelOpt NVFP4/FP8": write_modelopt,
}


def give_words(folder):
    """Give a folder the tokenizer of the tests, and an embedding for its words."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    names = [name for name in ("model.embed_tokens.weight", "lm_head.weight") if name in tensors]
    shape = (tiny_lm.WORDS, tensors[names[0]].shape[1])
    changes = {name: (torch.randn(shape, generator=generator) * 0.1).to(tensors[name].dtype) for name in names}
    edit_tensors(folder, changes)
    edit_json(folder / "config.json", vocab_size=tiny_lm.WORDS, eos_token_id=None)
    tiny_lm.tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("kind", sampled(SOURCES, 3))
def test_a_packed_source_is_scored_and_exported_as_the_floats_it_holds(tmp_path, kind):
    packed, plain, onnx, low = (tmp_path / name for name in ("packed", "plain", "onnx", "low"))
    SOURCES[kind](packed)
    give_words(packed)
    assert kind.partition("/")[0] in inspect_checkpoint(packed).rounded
    score = compute_perplexity(
        TorchModel(load(packed, dtype="float32"), tiny_lm.tokenizer()), TEXT, window=64, stride=64
    )
    diffquant.quantize(packed, plain, {"weights": "16"}, dtype="float32")
    again = compute_perplexity(
        TorchModel(load(plain, dtype="float32"), tiny_lm.tokenizer()), TEXT, window=64, stride=64
    )
    assert again["perplexity"] == score["perplexity"]

    export(packed, onnx, ExportOptions.parse(dtype="float32"))
    assert next(iter(verify(onnx, packed, tolerance=1e-4).tokens.values())).agreement == 1.0
    exported = compute_perplexity(OnnxRuntime().open(onnx, "cpu"), TEXT, window=64, stride=64)
    assert exported["perplexity"] == pytest.approx(score["perplexity"], rel=1e-3)

    # What the user has beside what we make of it.
    diffquant.quantize(packed, low, {"weights": "4:g16"})
    (tmp_path / "text.txt").write_text(TEXT)
    found = diffquant.fidelity(packed, low, text=tmp_path / "text.txt", context=32)
    assert found.perplexities[0] != found.perplexities[1]
    assert found.mean.mean > 0
