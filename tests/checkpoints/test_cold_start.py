"""Verbs on checkpoints start fast: they import neither transformers nor a compiler, which take longer than the work."""

import subprocess
import sys

import pytest

from tests.checkpoints.test_convert import UNILM_V1
from tests.support.checkpoints import write_diffllama, write_llama, write_random
from tests.support.gguf_files import write_gguf
from tests.support.thorough import sampled

HEAVY = {"transformers", "torch._dynamo", "torch._inductor", "sympy", "triton", "matplotlib", "onnx", "onnxruntime"}
CLI = """
import sys
from diffquant.verbs.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    llama, diffllama = write_llama(folder / "llama"), write_diffllama(folder / "diffllama")
    write_random(folder / "unilm", UNILM_V1 | {"num_key_value_heads": 4})
    gguf = write_gguf(folder / "llama.gguf", llama)
    return {"LLAMA": llama, "DIFFLLAMA": diffllama, "UNILM": folder / "unilm", "GGUF": gguf}


COMMANDS = ["inspect GGUF", "inspect DIFFLLAMA", "convert UNILM -o OUT --to diffllama"]
COMMANDS += ["quantize LLAMA -o OUT --weights 4:g32 --rounding mse", "quantize DIFFLLAMA -o OUT --weights 4:g32"]


@pytest.mark.parametrize("command", sampled([*COMMANDS, "convert LLAMA -o OUT --to diff-v2"], 6))
def test_a_verb_on_a_checkpoint_imports_no_models_and_no_compiler(tmp_path, checkpoints, command):
    places = {name: str(path) for name, path in checkpoints.items()} | {"OUT": str(tmp_path / "out")}
    arguments = [places.get(word, word) for word in command.split()]
    done = subprocess.run([sys.executable, "-c", CLI, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split("\n")[-2].split())
