"""Verbs on checkpoints start fast: they import neither transformers nor a compiler, which take longer than the work.

Mistakes that a command line shows are answered before torch is imported.
"""

import json
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


MISTAKES = [
    ("quantize nowhere -o OUT", "nowhere is neither"),
    ("quantize LLAMA -o OUT --weights 4g32", "did you mean 4:g32?"),
    ("quantize LLAMA -o OUT --wieghts 4:g32", "--weights"),
    ("quantize LLAMA -o OUT --preset W4A16", "--weights 4:g32 here (4:g128 with llm-compressor's groups)"),
    ("quantize LLAMA -o OUT --scheme W4A16", "use --weights BITS:gSIZE, such as 4:g32, or --preset int4"),
    ("plan LLAMA --context 32k", "32k may be 32000 or 32768: give one of them"),
    ("eval LLAMA --tasks wikitext", "lm-eval:wikitext"),
    ("sweep LLAMA -o OUT --targets wights", "did you mean 'weights'?"),
    ("fidelity LLAMA nowhere", "nowhere is neither"),
    ("verify nowhere LLAMA", "there is no nowhere"),
    ("serve nowhere", "nowhere is neither"),
    ("serve LLAMA --max-model-len 32k", "use --context TOKENS"),
]


MAKE_MISTAKES = """
import json, sys
from contextlib import redirect_stderr
from io import StringIO
from diffquant.verbs.cli import main
for command in sys.stdin.read().splitlines():
    sys.argv[1:] = command.split()
    with redirect_stderr(StringIO()) as said:
        try:
            main()
        except SystemExit as stop:
            print(json.dumps([stop.code, said.getvalue(), "torch" in sys.modules]))
"""


def test_mistakes_are_answered_before_torch_is_imported(tmp_path, checkpoints):
    llama, out = str(checkpoints["LLAMA"]), str(tmp_path / "out")
    commands = "\n".join(command.replace("LLAMA", llama).replace("OUT", out) for command, _ in MISTAKES)
    done = subprocess.run([sys.executable, "-c", MAKE_MISTAKES], input=commands, capture_output=True, text=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (command, hint), (status, said, has_torch) in zip(MISTAKES, answers, strict=True):
        assert hint in said, command
        assert status in (1, 2), command
        assert not has_torch, command
