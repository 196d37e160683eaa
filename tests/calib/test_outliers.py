"""Outliers of whole models against transformers' own layers, torch.topk and exact medians."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diffquant.calib.calibration.observers import QUANTILE_ERROR
from diffquant.calib.outlier_result import HIDDEN, LOGITS, RANKS
from diffquant.calib.outliers import measure_magnitudes
from tests.support.models import ours, random_diffllama, random_ids, random_llama


def layer_magnitudes(oracle, ids):
    """(visible |logits|, |outputs|) of each layer, from transformers' projections and rotation."""
    config = oracle.config
    width = config.hidden_size // config.num_attention_heads
    hidden = oracle.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = oracle.model.rotary_emb(hidden, positions)
    mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
    visible = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    found = []
    for layer in oracle.model.layers:
        x = layer.input_layernorm(hidden)
        q, k = (
            p(x).unflatten(-1, (-1, width)).transpose(1, 2) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        logits = (q @ k.mT / width**0.5)[:, :, visible]
        out = layer(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        hidden = out[0] if isinstance(out, tuple) else out
        found.append((logits.abs().flatten(), hidden.abs().flatten()))
    return found


@pytest.mark.parametrize("make", [random_llama, random_diffllama], ids=["llama", "diffllama"])
@pytest.mark.parametrize("batch_tokens", [37, 4096])
def test_magnitudes_are_those_of_transformers_layers(make, batch_tokens):
    oracle = make(num_key_value_heads=4, num_hidden_layers=2)
    oracle.set_attn_implementation("eager")
    ids = random_ids(batch=3, length=37)
    layers, overall = measure_magnitudes(ours(oracle), ids, batch_tokens)
    expected = layer_magnitudes(oracle, ids)
    for found, (logits, hidden) in zip(layers, expected, strict=True):
        check(found[LOGITS], logits)
        check(found[HIDDEN], hidden)
    check(overall[LOGITS], torch.cat([logits for logits, _ in expected]))
    check(overall[HIDDEN], torch.cat([hidden for _, hidden in expected]))


def check(found, values):
    assert found.count == len(values)
    top = values.topk(max(RANKS)).values
    assert list(found.top) == list(RANKS)
    for rank, value in found.top.items():
        assert value == pytest.approx(float(top[rank - 1]), rel=2e-5)
    assert found.median == pytest.approx(float(values.median()), rel=QUANTILE_ERROR + 1e-4)
