"""Engines that answer many requests at once: vLLM behind `diffquant serve`, diffquant, transformers, ONNX Runtime."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import numpy as np

from diffquant.checkpoints.opening import open_checkpoint
from diffquant.errors import DiffQuantError

# Of prompts [N, T] and a count, the tokens [N, count] that follow them greedily.
Batch = Callable[[np.ndarray, int], np.ndarray]
# How long transformers' thread may take for a batch on a processor, in seconds.
_PATIENCE = 600
_PAGE = 32


@dataclass(frozen=True)
class BatchSettings:
    """Settings that all engines share.

    Attributes:
        dtype: name of the torch dtype.
        threads: threads of each engine.
        requests: numbers of requests at once.
        prompt, new: tokens of a prompt, and of its answer.
        repeats: turns of each engine.
    """

    dtype: str
    threads: int
    requests: tuple[int, ...] = (1, 8, 32)
    prompt: int = 32
    new: int = 16
    repeats: int = 3

    @property
    def context(self) -> int:
        return self.prompt + self.new


def open_served(folder: Path, settings: BatchSettings, closing: ExitStack) -> Batch:
    """Answers of `diffquant serve` over HTTP, each request a client of its own.

    Raises:
        DiffQuantError: the server did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "diffquant", "serve", str(folder), "--port", str(port)]
    command += ["--dtype", settings.dtype, "--context", str(settings.context)]
    log = closing.enter_context(TemporaryDirectory()) + "/log"
    with Path(log).open("w") as errors:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(settings.threads)},
        )
    closing.callback(_end, server)
    url = server.stdout.readline().strip() if server.stdout else ""
    if not url:
        server.wait()
        raise DiffQuantError(Path(log).read_text().strip().splitlines()[-1].removeprefix("error: "))
    clients = closing.enter_context(ThreadPoolExecutor(max(settings.requests)))

    def ask(prompt: list[int], count: int) -> list[int]:
        asked = {"model": folder.name, "prompt": prompt, "max_tokens": count, "temperature": 0}
        body = json.dumps(asked | {"ignore_eos": True, "return_token_ids": True}).encode()
        with urlopen(Request(f"{url}/completions", body, {"Content-Type": "application/json"})) as answer:
            tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
            return tokens

    def batch(prompts: np.ndarray, count: int) -> np.ndarray:
        return np.array(list(clients.map(ask, prompts.tolist(), [count] * len(prompts))))

    return batch


def _end(server: "subprocess.Popen[str]") -> None:
    if server.poll() is None:
        server.terminate()
    server.wait()


def open_generate(folder: Path, settings: BatchSettings, closing: ExitStack) -> Batch:  # noqa: ARG001
    """Answers of diffquant in torch, all requests in one batch; the cache has 16 bits, as the others' has."""
    import torch

    from diffquant.quantization.loading import load

    torch.set_num_threads(settings.threads)
    model = load(folder, {"kv": 16}, dtype=settings.dtype, device="cpu")

    def batch(prompts: np.ndarray, count: int) -> np.ndarray:
        ids = torch.from_numpy(prompts)
        asked = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        tokens: np.ndarray = model.generate(ids, attention_mask=torch.ones_like(ids), **asked).numpy()
        return tokens[:, prompts.shape[1] :]

    return batch


def open_transformers_batch(folder: Path, settings: BatchSettings, closing: ExitStack) -> Batch:
    """Answers of transformers' continuous batching, which runs the folder by the file that it carries."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    torch.set_num_threads(settings.threads)
    # Where diffquant is imported, the automatic classes know its own models.
    file = json.loads((folder / "config.json").read_text()).get("auto_map", {}).get("AutoModelForCausalLM")
    model_class = get_class_from_dynamic_module(file, str(folder)) if file else AutoModelForCausalLM
    model = model_class.from_pretrained(folder, dtype=getattr(torch, settings.dtype)).eval()
    most = max(settings.requests)
    room = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=most * -(-settings.context // _PAGE),
        max_batch_tokens=most * settings.prompt,
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(max_new_tokens=settings.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = closing.enter_context(model.continuous_batching_context_manager(greedy, True, _PATIENCE, room))

    def batch(prompts: np.ndarray, count: int) -> np.ndarray:
        names = manager.add_requests(inputs=prompts.tolist(), max_new_tokens=count)
        answers: dict[str, list[int]] = {}
        started = time.monotonic()
        while len(answers) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
            elif not manager.is_running() or time.monotonic() - started > _PATIENCE:
                raise DiffQuantError("transformers' continuous batching ended before its requests did")
        return np.array([answers[name] for name in names])

    return batch


def open_onnx(folder: Path, settings: BatchSettings, closing: ExitStack) -> Batch:
    """Answers of diffquant's export in ONNX Runtime, in float32, all requests in one batch.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    from diffquant.onnx import ExportOptions, check_installed, export

    check_installed()
    from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel

    exported = Path(closing.enter_context(TemporaryDirectory())) / "onnx"
    export(folder, exported, ExportOptions.parse())
    model = OnnxModel(exported, settings.threads, device="cpu")

    def batch(prompts: np.ndarray, count: int) -> np.ndarray:
        decoder = InPlaceDecoder(model, len(prompts), settings.context)
        ids, tokens = prompts, []
        for _ in range(count):
            ids = decoder.step(ids)[:, -1:].argmax(-1)
            tokens.append(ids)
        return np.concatenate(tokens, 1)

    return batch


def random_prompts(folder: Path, settings: BatchSettings, turn: int, requests: int) -> np.ndarray:
    """Token ids [requests, prompt], others in each turn, so that no engine finds them in its cache."""
    generator = np.random.default_rng((turn, requests))
    return generator.integers(0, open_checkpoint(folder).config["vocab_size"], (requests, settings.prompt))
