"""Operations and bytes against closed forms, and against what torch counts itself."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffquant.attention.naive import naive
from diffquant.benchmarks.workloads import MODELS, Model, Workload, make_differential_call
from diffquant.model.walk import count_visible_logits
from research.bench import roofline
from tests.support.tables import in_one_test

V1 = Model("v1", 64, 2, 3, 3, 8, 16, 96)
V2 = Model("v2", 64, 2, 4, 2, 8, 8, 96)


def prompt(model, length=40, batch=2):
    return Workload(model, length, length, batch, "float32")


@in_one_test(("queries", "keys"), [(7, 7), (1, 9), (4, 10)])
def test_seen_entries_are_those_of_a_causal_mask(queries, keys):
    mask = torch.ones(queries, keys).tril(keys - queries)
    assert count_visible_logits(1, queries, keys) == int(mask.sum())


def test_v1_takes_6_fused_8_in_four_calls_and_the_transformer_4_units():
    work = prompt(V1)
    unit = 2 * count_visible_logits(2 * 3, 40, 40) * 8
    assert roofline.count_fused_call(work)[0] == 6 * unit
    assert roofline.count_call_per_map(work)[0] == 6 * unit
    assert roofline.count_call_per_half(work)[0] == 8 * unit
    assert roofline.count_simulated_logits(work)[0] == 8 * unit
    assert roofline.count_transformer(work)[0] == 4 * unit


def test_v2_has_no_halves_to_split():
    assert roofline.count_call_per_half(prompt(V2)) == roofline.count_call_per_map(prompt(V2))


@in_one_test("model", [V1, V2])
def test_eager_operations_are_what_torch_counts(model):
    work = prompt(model)
    call = make_differential_call(work, "cpu")
    with FlopCounterMode(display=False) as counter:
        naive(call)
    assert roofline.count_eager(work)[0] == counter.get_total_flops()


@in_one_test("model", [V1, V2])
def test_a_fused_kernel_moves_its_tensors_once(model):
    work = prompt(model)
    call = make_differential_call(work, "cpu")
    inputs = {id(x): x for x in (*call.q, *call.k, call.v)}.values()
    output = 2 * 40 * model.pairs * model.value_width * 4
    assert roofline.count_fused_call(work)[1] == sum(x.numel() * 4 for x in inputs) + output


def test_a_packed_cache_moves_its_bits():
    work = Workload(V1, 1, 64, 1, "float16")
    stored = 64 * 3 * (2 * 8 + 16)
    whole, packed = roofline.count_fused_call(work), roofline.count_fused_call(work, key_bytes=0.5, value_bytes=0.5)
    assert whole[1] - packed[1] == stored * 1.5
    assert whole[0] == packed[0]


@in_one_test("name", ["830M", "1.4B", "2.8B", "6.8B", "13.1B"])
def test_the_papers_models_have_as_many_parameters_as_their_names_say(name):
    said, of = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]], MODELS[name]
    attention = of.hidden * of.width * 2 * (2 * of.pairs + 2 * of.kv_pairs)
    # Those of the matched Transformer, with tied embeddings.
    count = of.layers * (attention + 3 * of.hidden * of.inner) + of.vocabulary * of.hidden
    assert count == pytest.approx(said, rel=0.015)
