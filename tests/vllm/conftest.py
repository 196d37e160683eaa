"""What the tests of serving share: vLLM, where it is there and runs, and its answers to a list of jobs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from typing import Any

import pytest
import torch

import diffquant
from diffquant.data import books_text, pocket_models
from tests.vllm.checkpoints import KINDS

# vLLM chooses among builds of its kernels by what the processor has.
_PROBE = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.cpu_attention_with_kv_cache
"""
# The engine in the process that asks it, nothing compiled for its log-probabilities, no statistics, threads where the
# system puts them, and 16 bits in 4-bit products: on AMX vLLM would round to 8 what is multiplied by the weights.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
ENVIRONMENT |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
ENVIRONMENT |= {"VLLM_CPU_INT4_W4A8": "0"}


@cache
def why_not() -> str | None:
    """Reason for which vLLM does not run here; None where it does."""
    if find_spec("vllm") is None:
        return "needs vLLM, which is what make test-all ONLY=serving fetches"
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        return f"this processor has no instructions that vLLM's wheel needs, or it is damaged: {last}"
    return None


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


# vLLM's build for other processors has no kernel for 4 bits, and no fp8 cache.
needs_avx512 = pytest.mark.skipif(
    machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="this processor has no AVX-512",
)

Engine = Callable[..., tuple[list[Any], str]]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Runs jobs of tests/vllm/engine.py, with further variables; returns the answers, and what was printed."""
    errors = tmp_path_factory.mktemp("engine") / "errors.txt"
    command = [sys.executable, Path(__file__).parent / "engine.py"]
    pipe = subprocess.PIPE
    with (
        errors.open("w") as file,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=file, text=True, env=os.environ | ENVIRONMENT
        ) as process,
    ):

        def run(jobs: list[dict[str, Any]], **variables: str) -> tuple[list[Any], str]:
            place = tmp_path_factory.mktemp("engine")
            (place / "log.txt").touch()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"jobs": jobs, "variables": variables, "place": str(place)}) + "\n")
            process.stdin.flush()
            answers = process.stdout.readline()
            assert answers, errors.read_text()[-4000:]
            return json.loads(answers), (place / "log.txt").read_text()

        yield run
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders at 4 bits of models that were trained, by `KINDS`."""
    root = tmp_path_factory.mktemp("trained")
    pockets = {path.name: path for path in pocket_models("prose")}
    for kind in KINDS:
        diffquant.quantize(pockets[kind], root / kind, {"weights": "4:row", "kv": "8:row"})
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def low_attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with attention alone at 4 bits: vLLM's kernel for processors takes outputs by multiples of 32, as the
    plugin need not, and these models' networks are 300 and 344 wide.
    """
    root, pockets = tmp_path_factory.mktemp("attention"), {path.name: path for path in pocket_models("prose")}
    for kind in KINDS:
        recipe = {"weights": "4:row", "overrides": {"*.mlp.*": "16"}}
        diffquant.quantize(pockets[kind], root / kind, recipe)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def prose(trained: dict[str, Path]) -> list[int]:
    """A text that these models were trained on the like of."""
    ids: list[int] = diffquant.load_tokenizer(trained[KINDS[0]])(books_text()[5000:5600])["input_ids"]
    return ids[:120]
