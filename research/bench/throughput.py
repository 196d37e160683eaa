"""Speed of whole models' forward passes in tokens per second, for sizes that this machine can run.

Source: arXiv 2410.05258, Table 7, forward columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diffquant.benchmarks.cells import BenchCell
from diffquant.benchmarks.measuring import make_timer, run_in_turns
from diffquant.benchmarks.run import BenchOptions, Part
from diffquant.benchmarks.workloads import Model, find_model
from diffquant.support.progress import Progress, report_nothing

THROUGHPUT = "throughput"
TRANSFORMER, V1, V2 = "Transformer", "DIFF V1", "DIFF V2"


def throughput_parts(options: BenchOptions) -> dict[str, Part]:
    """Return the section's only part: the 3B model on CUDA, and two layers of a smaller one on a CPU."""
    if options.device == "cuda":
        model, lengths = find_model("3B"), (2048, 4096)
    else:
        whole, lengths = find_model("830M"), (512, 1024)
        model = replace(whole, name=f"{whole.name} of 2 layers", layers=2, vocabulary=8192)

    def measure(progress: Progress) -> list[BenchCell]:
        repeats = min(options.repeats, 3)
        return run_throughput([model], lengths, 1, options.chosen_dtype, options.device, repeats, progress)

    return {model.name: measure}


def run_throughput(
    models: Sequence[Model], lengths: Sequence[int], batch: int, dtype: str, device: str, repeats: int,
    progress: Progress = report_nothing,
) -> list[BenchCell]:  # fmt: skip
    """Time forward passes of each model as Transformer, DIFF V1 and DIFF V2, with random weights, at each length."""
    cells = []
    for done, model in enumerate(models):
        forms = {name: _random_model(model, name, max(lengths), dtype, device) for name in (TRANSFORMER, V1, V2)}
        for length in lengths:
            progress(done, len(models), f"throughput: {model.name}, {length} tokens")
            cells += _measure_forms(model, forms, length, batch, dtype, device, repeats)
    return cells


@torch.inference_mode()
def _measure_forms(
    model: Model, forms: dict[str, Any], length: int, batch: int, dtype: str, device: str, repeats: int
) -> list[BenchCell]:
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.vocabulary, (batch, length), generator=generator, device=device)
    calls = {name: make_timer(partial(form, ids, use_cache=False), device) for name, form in forms.items()}
    workload = f"{model.name}, {length} tokens, batch {batch}, {dtype}"
    return [
        BenchCell(
            THROUGHPUT,
            workload,
            name,
            unit="tokens/s",
            values=tuple(1e3 * batch * length / ms for ms in times),
            baseline=TRANSFORMER,
            length=length,
            facts={"parameters": float(sum(p.numel() for p in forms[name].parameters()))},
        )
        for name, times in run_in_turns(calls, repeats).items()
    ]


def _random_model(model: Model, form: str, context: int, dtype: str, device: str) -> Any:
    from diffquant.model.config import DiffTransformerConfig
    from diffquant.model.modeling import DiffTransformer

    torch.manual_seed(0)
    config = DiffTransformerConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=2 * model.pairs,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        spec=_spec(model, form),
    )
    return DiffTransformer(config).to(device, getattr(torch, dtype)).eval()


def _spec(model: Model, form: str) -> dict[str, Any]:
    """Return a form's spec: a Transformer with 2h heads, V1 with h pairs, or V2 with 2h pairs and 2h KV heads."""
    from diffquant.family.spec import DiffSpec

    heads, width = 2 * model.pairs, model.width
    if form == TRANSFORMER:
        spec = DiffSpec(heads, heads, width, width, maps=1)
    elif form == V1:
        spec = DiffSpec(model.pairs, model.pairs, width, 2 * width, lam="exp", post_norm="plain", scale_by_init=True)
    else:
        spec = DiffSpec(heads, heads, width, width, shared_k=True, lam="sigmoid")
    return spec.to_dict()
