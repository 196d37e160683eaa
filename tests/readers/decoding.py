"""Greedy decoding by any function from a model's inputs to its outputs, with NumPy alone: environments differ."""

import numpy as np


def greedy(run, caches, ids, count):
    """The next `count` tokens.

    Args:
        run: function from inputs to outputs, both by name.
        caches: dtype and sizes of one sequence's cache or state by its input's name, 0 for its tokens.
        ids: tokens of the prompt.
    """
    ids, feeds = list(ids), {name: np.zeros((1, *sizes), dtype) for name, (dtype, sizes) in caches.items()}
    for made in range(count):
        feeds["input_ids"] = np.array([ids[-1:] if made else ids], np.int64)
        feeds["attention_mask"] = np.ones((1, len(ids)), np.int64)
        outputs = run(feeds)
        feeds |= {name: outputs[present(name)] for name in caches}
        ids.append(int(outputs["logits"][0, -1].argmax()))
    return ids[-count:]


def present(past):
    """Name of the output that gives what an input takes, and more."""
    return past.replace("past_key_values", "present").replace("past_", "present_")
