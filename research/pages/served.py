"""Figures on served models, of the page on speed: tokens per second, and what each engine serves."""

from statistics import median

from research.pages.raw import raw
from research.pages.render import ends, fixed, table

_SERVED = raw("serve-bench.json")
_TURNS = {(e["model"], e["bits"], e["requests"], e["engine"]): e["values"] for e in _SERVED["rows"] if "values" in e}
_ENGINES = {
    "`diffquant serve`": "diffquant serve",
    "`diffquant generate`": "diffquant generate",
    "`generate_batch`": "transformers generate_batch",
    "ONNX Runtime": "ONNX Runtime",
}


def served_table() -> str:
    """Tokens per second with 1 and 32 requests."""
    rows = [
        [
            f"{model}, {bits} bits, {requests}",
            *(fixed(median(_TURNS[model, bits, requests, engine]), 0) for engine in _ENGINES.values()),
        ]
        for model in ("Transformer", "DIFF V2", "DIFF V1")
        for bits in ("16", "4")
        for requests in (1, 32)
    ]
    return table(["model, requests", *_ENGINES], rows)


def served_over(other: str) -> tuple[float, float]:
    """Served with 32 requests over another engine's batch, by paired turns: smallest and largest of models and bits."""
    return ends(aim["measured"] for aim in _SERVED["aims"] if aim["what"].endswith(f"32 requests: served / {other}"))


def served_gain() -> tuple[float, float]:
    """Tokens per second with 32 requests over those with one."""
    return ends(aim["measured"] for aim in _SERVED["aims"] if aim["what"].endswith("32 requests / 1"))


SERVED_TURNS = max(max(values) / min(values) for values in _TURNS.values())
_FOUND = raw("serving.json")["found"]
TOKENS_ARE_EQUAL = all(each["tokens equal"] for each in _FOUND if each.get("tokens equal") is not None)
_FURTHEST = [each for each in _FOUND if each.get("furthest") is not None and "cache" not in each]
FURTHEST = max(each["furthest"] for each in _FURTHEST if each["source"] != "motif3")
FURTHEST_OF_MOTIF3 = max(each["furthest"] for each in _FURTHEST if each["source"] == "motif3")
SERVED_DATES = ends([each["date"] for each in _FOUND])
SERVED_BY = raw("serving.json")["versions"]
SERVED_KINDS = len({each["source"] for each in _FOUND if each["where"] == "plugin" and "refused" not in each})
# Where the tests found something, as an engine and what of it was in use.
_WHERE = {
    "plugin": ("vLLM, plugin", ""),
    "chunked": ("vLLM, plugin", "chunks and prefixes"),
    "two ranks": ("vLLM, plugin", "two ranks"),
    "pipeline": ("vLLM, plugin", "pipeline"),
    "adapter": ("vLLM, plugin", "LoRA"),
    "adapter on two ranks": ("vLLM, plugin", "LoRA on two ranks"),
    "folder": ("vLLM, folder alone", ""),
    "folder on two ranks": ("vLLM, folder alone", "two ranks"),
    "transformers": ("transformers alone", ""),
}


def support_table() -> str:
    """What works and what is refused, by engine and model; what is in neither was not tried."""
    models: dict[tuple[str, str], dict[str, dict[str, bool]]] = {}
    for each in _FOUND:
        if each["where"] in _WHERE:
            engine, use = _WHERE[each["where"]]
            cells = models.setdefault((engine, each["source"]), {"weights": {}, "cache": {}, "activations": {}, "": {}})
            what, said = next(
                ((of, each[of]) for of in ("cache", "activations") if each.get(of, "16") != "16"),
                ("weights", each["bits"]),
            )
            if what == "activations":
                said = f"{said} with {each['bits']}"
            cells["" if use else what][use or said] = "refused" not in each
    rows: dict[tuple[str, ...], list[str]] = {}
    for (engine, source), cells in models.items():
        rows.setdefault((engine, *map(_works, cells.values())), []).append(source)
    heads = ["engine", "models", "weights", "cache", "activations", "also"]
    return table(heads, sorted([engine, ", ".join(sources), *cells] for (engine, *cells), sources in rows.items()))


def _works(found: dict[str, bool]) -> str:
    """What works, then what is refused."""
    parts = [[name for name, works in found.items() if works is wanted] for wanted in (True, False)]
    return (
        "; ".join(f"{said}{', '.join(names)}" for said, names in zip(("", "refused: "), parts, strict=True) if names)
        or "–"
    )


_OVER_HTTP = raw("serving-hellaswag.json")
SCORES_AGREE = (
    _OVER_HTTP["lm_eval_acc"] == _OVER_HTTP["our_acc"] and _OVER_HTTP["lm_eval_acc_norm"] == _OVER_HTTP["our_acc_norm"]
)
OVER_HTTP_ITEMS = _OVER_HTTP["items"]
