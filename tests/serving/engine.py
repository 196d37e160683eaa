"""What vLLM's engine makes of folders; a program of its own, which the tests beside it run.

Its first argument is a file with a list of jobs: a folder, prompts as token ids, and options of vLLM's `LLM`. Into the
second it writes what came out of each, round by round, or the error that it ended with.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

# Tiny models take no more; blocks are as small as the processor's attention allows.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 26,
    "block_size": 32,
}


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


def run(job: dict[str, Any]) -> Any:
    try:
        engine = LLM(job["folder"], **(OPTIONS | job.get("options", {})))
        found = [answers(engine, job) for _ in range(job.get("rounds", 1))]
        engine.llm_engine.engine_core.shutdown()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    del engine
    gc.collect()
    return found


if __name__ == "__main__":
    results = [run(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(results))
