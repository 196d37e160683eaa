"""Answers a request about folders with the tokens that OpenVINO decodes."""

import json
import sys
from pathlib import Path

import openvino

sys.path.insert(0, str(Path(__file__).parent))
from decoding import greedy, present

# Its default on some processors is bfloat16, whose tokens are its own.
_OPTIONS = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}


def tokens(core, task, count):
    model = core.compile_model(core.read_model(task["file"]), "CPU", _OPTIONS)
    caches = {}
    for port in model.inputs:
        if port.any_name.startswith("past"):
            sizes = [size.get_length() if size.is_static else 0 for size in list(port.partial_shape)[1:]]
            caches[port.any_name] = (port.element_type.to_dtype(), sizes)
    # OpenVINO may know a port by the name of a node as well.
    wanted = {"logits", *map(present, caches)}
    outputs = {next(iter(port.names & wanted)): port for port in model.outputs}

    def run(feeds):
        results = model(feeds)
        return {name: results[port].copy() for name, port in outputs.items()}

    return greedy(run, caches, task["ids"], count)


request = json.load(sys.stdin)
core = openvino.Core()
answers = {}
for name, task in request["tasks"].items():
    try:
        answers[name] = tokens(core, task, request["count"])
    except Exception as error:  # a refusal is an answer, too
        answers[name] = f"{type(error).__name__}: {error}"[:600]
json.dump({"version": openvino.__version__.split("-")[0], "answers": answers}, sys.stdout)
