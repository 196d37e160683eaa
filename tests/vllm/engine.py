"""Runs vLLM's engine on folders; a program of its own, which the tests beside it start once.

It imports vLLM, which takes longer than a tiny model does, and then reads orders from stdin, one a line: jobs, each a
folder, prompts as token ids and options of vLLM's `LLM`; variables of the environment; a file for what is printed; and
a file for the answers. Every job gets a process of its own, or one for each rank, that begins as a copy of this one.
Answers are those of the first rank, round by round, or the error that it ended with. A line is printed for each order.
"""

import gc
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import llama, transformers  # noqa: F401
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker import cpu_worker  # noqa: F401

# Tiny models take no more; blocks are as small as the processor's attention allows.
OPTIONS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 32}
OPTIONS |= {"max_num_batched_tokens": 256, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26}
OPTIONS |= {"block_size": 32}
_AT_ONCE = 2


def answers(engine: LLM, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each prompt, the tokens that follow it with their log-probabilities, and those of its own tokens."""
    read = job.get("reads_prompts", True)
    asked = SamplingParams(
        temperature=0,
        max_tokens=job.get("max_tokens", 8),
        logprobs=0,
        prompt_logprobs=0 if read else None,
        detokenize=False,
        ignore_eos=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    adapter = LoRARequest("adapter", 1, job["adapter"]) if "adapter" in job else None
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [_only(step) for step in answer.outputs[0].logprobs],
            "prompt": [_only(step) for step in answer.prompt_logprobs[1:]] if read else None,
            "cached": answer.num_cached_tokens,
        }
        for answer in engine.generate(prompts, asked, lora_request=adapter, use_tqdm=False)
    ]


def _only(step: dict[int, Any]) -> float:
    return next(iter(step.values())).logprob


def run(job: dict[str, Any], options: dict[str, Any], answer: Path | None) -> NoReturn:
    """Write what the engine answers to a job, or the error that it ends with, and end this process."""
    try:
        engine = LLM(job["folder"], **(OPTIONS | options))
        found: Any = [answers(engine, job) for _ in range(job.get("rounds", 1))]
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if answer is not None:
        answer.write_text(json.dumps(found))
    sys.stdout.flush()
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" and not isinstance(found, str):
        engine.llm_engine.engine_core.shutdown()
    # Taking an engine of this process apart takes longer than its answers did.
    os._exit(0)


def _where_ranks_meet(executor: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
    """An address, and this process's rank. Of "env://", vLLM's own, ranks of every engine would share memory's name."""
    rank = int(os.environ["RANK"])
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", rank, rank


ExecutorWithExternalLauncher._distributed_args = _where_ranks_meet


def start(job: dict[str, Any], variables: dict[str, str], log: Path, answer: Path) -> set[int]:
    """Start a job's processes, whose first rank writes the answer; returns their ids."""
    options, processes = job.get("options", {}), set()
    ranks = options.get("tensor_parallel_size", 1)
    if ranks > 1:
        # Ranks find one another as those of torchrun do.
        options = options | {"distributed_executor_backend": "external_launcher"}
        variables = variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    for rank in range(ranks):
        if process := os.fork():
            processes.add(process)
            continue
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)})
        run(job, options, answer if rank == 0 else None)
    return processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def obey(order: dict[str, Any]) -> list[Any]:
    """The answers to an order's jobs, a few of which run at once."""
    place, running = Path(order["place"]), set[int]()
    for number, job in enumerate(order["jobs"]):
        while len(running) >= _AT_ONCE:
            running.remove(os.wait()[0])
        running |= start(job, order["variables"], place / "log.txt", place / f"{number}.json")
    while running:
        running.remove(os.wait()[0])
    files = [place / f"{number}.json" for number in range(len(order["jobs"]))]
    return [json.loads(file.read_text()) if file.exists() else "the process ended" for file in files]


if __name__ == "__main__":
    # Else each engine would walk through all that was imported, several times.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)
