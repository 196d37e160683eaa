"""Answers a request about folders with the tokens that this environment's onnxruntime decodes, without diffquant."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent))
from decoding import greedy

_DTYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


def tokens(task, count):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(task["file"], options, providers=["CPUExecutionProvider"])
    past = [each for each in session.get_inputs() if each.name.startswith("past")]
    sizes = {each.name: [size if isinstance(size, int) else 0 for size in each.shape[1:]] for each in past}
    caches = {each.name: (_DTYPES[each.type], sizes[each.name]) for each in past}
    names = [each.name for each in session.get_outputs()]
    return greedy(lambda feeds: dict(zip(names, session.run(names, feeds), strict=True)), caches, task["ids"], count)


request = json.load(sys.stdin)
answers = {}
for name, task in request["tasks"].items():
    try:
        answers[name] = tokens(task, request["count"])
    except Exception as error:  # a refusal is an answer, too
        answers[name] = f"{type(error).__name__}: {error}"[:600]
json.dump({"version": onnxruntime.__version__, "answers": answers}, sys.stdout)
