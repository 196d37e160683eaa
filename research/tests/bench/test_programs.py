"""What the programs need to run, and what their options are."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diffquant.errors import UsageError
from research.bench.programs import contestants
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
# torch itself may take others of its own along, such as filelock and jinja2.
NOT_ON_GPU_MACHINES = {
    *("transformers", "safetensors", "gguf", "accelerate", "yaml", "typer", "matplotlib", "tqdm"),
    *("onnx", "onnxruntime", "onnxscript", "lm_eval", "compressed_tensors", "bitsandbytes", "scipy", "pytest"),
}
PROGRAMS = [
    "research.bench.programs.generate",
    "research.bench.programs.hellaswag",
    "research.bench.programs.native_op",
    "research.bench.programs.quantize",
    "research.bench.programs.serving",
    "tests.support.synthetic",
    "research.bench.__main__",
    "research.bench.programs.products",
    "research.bench.programs.quantize_index",
    "research.bench.programs.quantize_peers",
    "research.bench.programs.roundings",
]


def test_the_gpu_table_needs_torch_triton_and_numpy_alone():
    pytest.importorskip("triton")
    code = """
from diffquant.benchmarks import contest, decode, linears, peers, workloads
from research.bench.gpu import groups, ratios, tune
print(len(groups.groups()), len(tune.active_configs()) > 0, *contest.SECTIONS)
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=NOT_ON_GPU_MACHINES) + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["True", "attention", "decode"]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_says_what_it_does_and_what_its_options_are(module):
    if module.endswith(("products", "native_op")):
        pytest.importorskip("onnxruntime")
    program = typer.Typer()
    program.command()(import_module(module).main)
    command = typer.main.get_command(program)
    assert command.help.endswith(".")
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    assert CliRunner().invoke(program, ["--no-such-option"]).exit_code == 2


@thorough
def test_the_bench_runs_without_onnx_and_says_what_it_leaves_out():
    code = """
import importlib.util, sys
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name in ("onnx", "onnxruntime") else there(name, *of)
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
from diffquant.benchmarks.run import BenchOptions
from diffquant.support.progress import report_nothing
from research.bench.sections import program_sections
print(program_sections(())["export"](BenchOptions(("export",)))["ONNX"](report_nothing)[0].missing)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ONNX models need onnx, onnxruntime: pip install")


def test_contestants_are_chosen_by_name_in_their_own_order_beside_torch():
    assert contestants.chosen("") == list(contestants.CONTESTANTS)
    assert contestants.chosen(f"llama.cpp Q4_0; {contestants.FLOAT}") == [
        contestants.TORCH,
        contestants.FLOAT,
        "llama.cpp Q4_0",
    ]
    with pytest.raises(UsageError, match="no contestant is called 'vllm'; choose from torch float32;"):
        contestants.chosen("vllm")
