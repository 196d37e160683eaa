"""Greedy decoding by any function from a model's inputs to its outputs, with NumPy alone: environments differ."""

import numpy as np

_PAST, _PRESENT = "past_key_values.", "present."


def greedy(run, caches, ids, count):
    """The next `count` tokens.

    Args:
        run: function from inputs to outputs, both by name.
        caches: dtype, number of KV pairs and width of each cache by its input's name.
        ids: tokens of the prompt.
    """
    ids, feeds = (
        list(ids),
        {name: np.zeros((1, pairs, 0, width), dtype) for name, (dtype, pairs, width) in caches.items()},
    )
    for made in range(count):
        feeds["input_ids"] = np.array([ids[-1:] if made else ids], np.int64)
        feeds["attention_mask"] = np.ones((1, len(ids)), np.int64)
        outputs = run(feeds)
        feeds |= {name: outputs[_PRESENT + name.removeprefix(_PAST)] for name in caches}
        ids.append(int(outputs["logits"][0, -1].argmax()))
    return ids[-count:]
