"""Generation on an eighth of Motif-3's layers, with fewer experts and a smaller vocabulary, all of random weights.

    python -m research.bench.programs.generate_part --json bench/results/generate-motif-3.json

Attention, streams, dense networks and each expert have the released widths. The prompt is longer than the windows of
128 tokens. Each recipe generates greedily with its cache, and the logits of every step are held to those of reading the
whole text again at 16 bits of cache; a quantized cache tells its size.
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffquant.benchmarks.measuring import environment
from diffquant.errors import ToleranceError
from diffquant.model.causal import CausalModel
from diffquant.quantization.loading import load
from diffquant.recipe import Recipe
from diffquant.support.files import write_json
from diffquant.support.progress import progress_for
from tests.support.apart import JsonFile
from tests.support.synthetic import preset, synthesize

_LAYERS, _VOCABULARY = 7, 8192
_CACHES = {"16 bits": Recipe(), "8:row:rotated": Recipe.of(kv="8:row:rotated")}
# Of logits at 16 bits of cache, over their largest: sums run in another order.
_TOLERANCE = 1e-3


def main(
    experts: Annotated[int, typer.Option(min=8, help="Experts of each layer, of which 8 are chosen.")] = 12,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 140,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 8,
    workplace: Annotated[Path | None, typer.Option(help="Folder with room for the weights.")] = None,
    file: JsonFile = None,
) -> None:
    """Generate with an eighth of Motif-3's layers and few experts, of random weights."""
    shrunk = {"num_hidden_layers": _LAYERS, "num_experts": experts, "vocab_size": _VOCABULARY}
    config = preset("motif-3") | shrunk | {"num_nextn_predict_layers": 0}
    with tempfile.TemporaryDirectory(dir=workplace) as place:
        synthesize(Path(place) / "part", config, progress=progress_for("weights"))
        model = load(Path(place) / "part", dtype=torch.float32)
    ids = torch.randint(3, _VOCABULARY, (1, prompt), generator=torch.Generator().manual_seed(0))
    caches = {}
    for name, recipe in _CACHES.items():
        model.apply_recipe(recipe)
        caches[name] = generate(model, ids, tokens)
        print(f"{name}: {caches[name]}")
    result: dict[str, Any] = {
        "environment": environment(),
        "model": "motif-3",
        "weights": "random, normal with a deviation of 0.02",
        "shrunk": shrunk,
        "parameters": sum(each.numel() for each in model.parameters()),
        "prompt": prompt,
        "peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "caches": caches,
    }
    if file:
        write_json(file, result)
    if caches["16 bits"]["error"] > _TOLERANCE:
        raise ToleranceError(f"logits of steps differ by {caches['16 bits']['error']:.2g} of the largest")


@torch.inference_mode()
def generate(model: CausalModel, ids: torch.Tensor, tokens: int) -> dict[str, float]:
    """Generate greedily under the model's recipe, and compare each step with a whole reading at 16 bits of cache.

    Returns:
        Number of tokens; seconds of the prompt, and of each token after it; bytes of the cache at the end; "error", the
        largest difference of a step's logits from those of reading the whole text again, over their largest.
    """
    cache, recipe = model.new_cache(), model.recipe
    started = time.monotonic()
    logits = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
    read = time.monotonic()
    for _ in range(tokens - 1):
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        logits.append(model(ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1])
    per_token = (time.monotonic() - read) / (tokens - 1)
    model.apply_recipe(Recipe())
    whole = model(ids).logits[:, -tokens:]
    model.apply_recipe(recipe)
    error = (torch.stack(logits, 1) - whole).abs().max() / whole.abs().max()
    return {
        "tokens": tokens,
        "prompt_seconds": read - started,
        "seconds_per_token": per_token,
        "cache_bytes": cache.nbytes,
        "error": float(error),
    }


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
