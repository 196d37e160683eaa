"""What the bench needs to run, how it names what it imports, and what its programs take."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from diffquant.bench.programs import contestants
from diffquant.errors import UsageError
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[2]
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
    "diffquant.bench.programs.generate",
    "diffquant.bench.programs.hellaswag",
    "diffquant.bench.programs.native_op",
    "diffquant.bench.programs.products",
    "diffquant.bench.programs.quantize",
    "diffquant.bench.programs.quantize_index",
    "diffquant.bench.programs.quantize_peers",
    "diffquant.bench.programs.roundings",
    "diffquant.bench.programs.serving",
    "diffquant.bench.synthetic",
]


def run_program(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


def test_the_gpu_table_needs_torch_triton_and_numpy_alone():
    pytest.importorskip("triton")
    code = """
from diffquant.bench.contest import contest, decode, diffllama, kernels, linears, peers, roofline, workloads
from diffquant.bench.gpu import groups, ratios, tune
print(len(groups.groups()), len(tune.shipped()) > 0, *contest.SECTIONS)
"""
    done = run_program(WITHOUT.format(packages=NOT_ON_GPU_MACHINES) + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["True", "attention", "decode"]


@thorough
def test_the_bench_runs_without_onnx_and_says_what_it_leaves_out():
    code = """
import importlib.util, sys
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name in ("onnx", "onnxruntime") else there(name, *of)
sys.modules["onnx"] = sys.modules["onnxruntime"] = None
from diffquant.bench.options import BenchOptions
from diffquant.bench.sections import PARTS
from diffquant.support.progress import silent
print(PARTS["export"](BenchOptions(("export",)))["ONNX"](silent)[0].missing)
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ONNX models need onnx, onnxruntime: pip install")


def test_the_projects_modules_are_imported_by_name_and_not_by_string():
    for file in sorted((ROOT / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                what = ast.unparse(node.args[0])
                assert "diffquant" not in what, f"{file}: {what}"
                assert not what.lstrip("f'\"").startswith("."), f"{file}: {what}"


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_says_what_it_does_and_what_its_options_are(module):
    if module.endswith(("native_op", "products")):
        pytest.importorskip("onnxruntime")
    program = typer.Typer()
    program.command()(import_module(module).main)
    command = typer.main.get_command(program)
    assert command.help.endswith(".")
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
    assert CliRunner().invoke(program, ["--no-such-option"]).exit_code == 2


def test_contestants_are_chosen_by_name_in_their_own_order_beside_torch():
    assert contestants.chosen("") == list(contestants.CONTESTANTS)
    assert contestants.chosen(f"llama.cpp Q4_0; {contestants.FLOAT}") == [
        contestants.TORCH,
        contestants.FLOAT,
        "llama.cpp Q4_0",
    ]
    with pytest.raises(UsageError, match="no contestant is called 'vllm'; known are torch float32;"):
        contestants.chosen("vllm")
