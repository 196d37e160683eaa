"""Greedy generation from an exported folder with onnxruntime and numpy alone.

diffquant export MODEL -o model --weights 4:g32
python onnxruntime_minimal.py model "The capital of France is"
"""

import json
import sys

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

folder, prompt = sys.argv[1], sys.argv[2]
tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
tokenizer.no_truncation()
tokenizer.no_padding()
with open(f"{folder}/genai_config.json", encoding="utf-8") as file:
    ends = json.load(file)["model"]["eos_token_id"]
session = ort.InferenceSession(f"{folder}/model.onnx")
# Keys and values of the past, which has no tokens yet, and states of Mamba layers, which begin at zero.
cache = [i for i in session.get_inputs() if i.name.startswith("past_")]
present = [i.name.replace("past_key_values", "present").replace("past_", "present_") for i in cache]
kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
shapes = {i.name: [1, *(size if isinstance(size, int) else 0 for size in i.shape[1:])] for i in cache}
feeds = {i.name: np.zeros(shapes[i.name], kinds[i.type]) for i in cache}
ids = tokenizer.encode(prompt).ids
for step in range(32):
    feeds["input_ids"] = np.array([ids if step == 0 else ids[-1:]], np.int64)
    feeds["attention_mask"] = np.ones((1, len(ids)), np.int64)
    logits, *after = session.run(["logits", *present], feeds)
    feeds.update(zip((i.name for i in cache), after, strict=True))
    ids.append(int(logits[0, -1].argmax()))
    if ids[-1] in ends:
        break
print(tokenizer.decode(ids))
