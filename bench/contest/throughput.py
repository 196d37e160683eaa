"""Throughput of whole models, forward, in tokens a second: a Transformer and its DIFF models side by side.

In form the paper's Table 7 (arXiv 2410.05258, forward columns), at sizes that this machine can do.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diffquant.bench.cells import BenchCell
from diffquant.bench.contest.workloads import Model
from diffquant.bench.timing import interleaved, prepare
from diffquant.report.tables import markdown
from diffquant.support.progress import Progress, silent

SECTION = "throughput"
TRANSFORMER, V1, V2 = "Transformer", "DIFF V1", "DIFF V2"


def run_throughput(
    models: Sequence[Model], lengths: Sequence[int], batch: int, dtype: str, device: str, repeats: int,
    progress: Progress = silent,
) -> list[BenchCell]:  # fmt: skip
    """Cells of each model's three forms, of random weights, at each length, in tokens a second."""
    cells = []
    for done, model in enumerate(models):
        forms = {name: _random_model(model, name, max(lengths), dtype, device) for name in (TRANSFORMER, V1, V2)}
        for length in lengths:
            progress(done, len(models), f"throughput: {model.name}, {length} tokens")
            cells += _measure(model, forms, length, batch, dtype, device, repeats)
    return cells


def smaller(model: Model, layers: int, vocabulary: int) -> Model:
    """Model of a model's first layers with a small vocabulary; its time is in proportion to the layers."""
    return replace(model, name=f"{model.name} of {layers} layers", layers=layers, vocabulary=vocabulary)


@torch.inference_mode()
def _measure(
    model: Model, forms: dict[str, Any], length: int, batch: int, dtype: str, device: str, repeats: int
) -> list[BenchCell]:
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.vocabulary, (batch, length), generator=generator, device=device)
    calls = {name: prepare(partial(form, ids, use_cache=False), device) for name, form in forms.items()}
    workload = f"{model.name}, {length} tokens, batch {batch}, {dtype}"
    return [
        BenchCell(
            SECTION,
            workload,
            name,
            unit="tokens/s",
            values=tuple(1e3 * batch * length / ms for ms in times),
            baseline=TRANSFORMER,
            length=length,
            facts={"parameters": float(sum(p.numel() for p in forms[name].parameters()))},
        )
        for name, times in interleaved(calls, repeats).items()
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
    """Spec of a form: the Transformer has 2h heads; V1 pairs them; V2 keeps its KV heads and doubles its queries."""
    from diffquant.family.spec import DiffSpec

    heads, width = 2 * model.pairs, model.width
    if form == TRANSFORMER:
        spec = DiffSpec(heads, heads, width, width, maps=1)
    elif form == V1:
        spec = DiffSpec(model.pairs, model.pairs, width, 2 * width, lam="exp", post_norm="plain", scale_by_init=True)
    else:
        spec = DiffSpec(heads, heads, width, width, shared_k=True, lam="sigmoid")
    return spec.to_dict()


def table7(cells: Sequence[BenchCell]) -> str:
    """Markdown of the cells as the paper prints them: Transformer, then DIFF with its change in percent."""
    rows = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        cell_by_path = {cell.path: cell for cell in cells if cell.workload == workload and cell.spread}
        baseline = cell_by_path[TRANSFORMER].spread if TRANSFORMER in cell_by_path else None
        if baseline is None:
            continue
        texts = []
        for form in (V1, V2):
            now = cell_by_path[form].spread if form in cell_by_path else None
            texts.append(f"{now.median:.0f} ({now.median / baseline.median - 1:+.0%})" if now else "-")
        length = str(cell_by_path[TRANSFORMER].length)
        rows.append([workload.split(",")[0], length, f"{baseline.median:.0f}", *texts])
    return "\n".join(markdown(["model", "length", "Transformer, tokens/s", V1, V2], rows))
