"""Logits of the last position: what an exported folder gives that generates, whatever the lengths of a batch."""

import numpy as np
import pytest
import torch
from transformers import DiffLlamaForCausalLM

from diffquant.onnx import ExportOptions, export
from diffquant.onnx.runtime.session import OnnxModel
from tests.support.checkpoints import write_checkpoint
from tests.support.models import random_ids

LENGTHS = (7, 1, 12)


@pytest.fixture(scope="module", params=[{}, {"portable": True}], ids=["", "portable"])
def exported(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("last")
    source = write_checkpoint(root / "source", "diffllama")
    export(source, root / "out", ExportOptions(**request.param))
    return source, root / "out"


def padded():
    ids = random_ids(len(LENGTHS), max(LENGTHS))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids, mask.long()


@torch.inference_mode()
def test_each_sequence_of_a_padded_batch_has_its_own_last_logits_and_so_has_the_next_call(exported):
    source, folder = exported
    oracle, model = DiffLlamaForCausalLM.from_pretrained(source).eval(), OnnxModel(folder, 1)
    ids, mask = padded()
    (logits,), cache = model.run(ids.numpy(), mask.numpy(), model.empty_cache(len(ids)))
    assert logits.shape[:2] == (len(ids), 1)
    for row, length, given in zip(ids, LENGTHS, logits, strict=True):
        wanted = oracle(row[None, :length]).logits[0, -1]
        np.testing.assert_allclose(given[0], wanted.numpy(), rtol=0, atol=2e-5)

    more = random_ids(len(ids), 1, seed=1)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    (logits,), _ = model.run(more.numpy(), longer.numpy(), cache)
    for row, new, length, given in zip(ids, more, LENGTHS, logits, strict=True):
        wanted = oracle(torch.cat([row[:length], new])[None]).logits[0, -1]
        np.testing.assert_allclose(given, wanted.numpy()[None], rtol=0, atol=2e-5)


def test_a_model_without_a_cache_scores_and_gives_every_position(tmp_path):
    source = write_checkpoint(tmp_path / "source", "diffllama")
    export(source, tmp_path / "out", ExportOptions(cache=False))
    ids = random_ids(1, 6).numpy()
    (logits,), _ = OnnxModel(tmp_path / "out", 1).run(ids, np.ones_like(ids), [])
    assert logits.shape[:2] == ids.shape
