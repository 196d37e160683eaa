"""The parts of a verification against what nobody here wrote."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import entropy, kurtosis
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from diffquant.checkpoints.ranges import write_ranges
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, ToleranceError
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.files import RANGES_FILE
from diffquant.onnx.graph.plan import static_scales
from diffquant.onnx.runtime import interface
from diffquant.onnx.runtime.interface import load_graph
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.onnx.verification import passages, rounding
from diffquant.onnx.verification.caches import WHOLE, read_cache_scales
from diffquant.onnx.verification.errors import StageErrors, StageNoise, compute_stage_errors, relative_rms
from diffquant.onnx.verification.passages import list_past_lengths, run_far_tokens
from diffquant.onnx.verification.reference import Reference
from diffquant.onnx.verification.report import Measure, measure_stages, worst_measure
from diffquant.onnx.verification.rounding import (
    NoiseSource,
    find_activation_rounding,
    leave_unrounded,
    round_by_block,
    round_by_row,
)
from diffquant.onnx.verification.routes import PREFILL, iterate_routes, prefill, run_last_positions
from diffquant.onnx.verification.tokens import compare_tokens, has_lower_agreement
from diffquant.onnx.verifier import rope_error_ratio
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import cache_ranges
from tests.support.models import random_ids
from tests.support.planted import PlantedExport
from tests.support.tables import in_one_test


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_rule_by_which_the_runtime_rounds_activations_is_found(bits, block):
    assert find_activation_rounding(bits, block) in (round_by_block, round_by_row, leave_unrounded)


@in_one_test(
    ("of_one", "of_many", "found"),
    [
        (round_by_block, round_by_block, round_by_block),
        (round_by_row, round_by_row, round_by_row),
        (leave_unrounded, leave_unrounded, leave_unrounded),
        (round_by_block, round_by_row, None),
        (leave_unrounded, round_by_block, None),
        (lambda x, block: 1.01 * x, lambda x, block: 1.01 * x, None),
    ],
)
def test_a_rule_is_found_only_where_one_row_and_many_are_rounded_by_it(monkeypatch, of_one, of_many, found):
    def runtime(x, bits, block):
        return (of_one if len(x) == 1 else of_many)(x, block)

    monkeypatch.setattr(rounding, "_through_identity", runtime)
    assert find_activation_rounding.__wrapped__(4, 16) is found


def test_activations_are_rounded_to_127_steps_of_their_blocks_largest():
    x = torch.tensor([[127.0, 1.4, -0.6, 0.5, 12.7, 0.04, -0.06]])
    expected = torch.tensor([[127.0, 1.0, -1.0, 0.0, 12.7, 0.0, -0.1]])
    torch.testing.assert_close(round_by_block(x, 4), expected)
    torch.testing.assert_close(round_by_row(x, 4), torch.tensor([[127.0, 1.0, -1.0, 0.0, 13.0, 0.0, 0.0]]))
    assert not round_by_block(torch.zeros(2, 5), 4).any()


def test_divergences_are_scipys():
    logits = torch.randn(2, 1, 9, 11, generator=torch.Generator().manual_seed(0))
    compared = compare_tokens([(logits[0], logits[1])])
    reference, model = (x[0].softmax(-1).double().numpy() for x in logits)
    divergences = entropy(reference, model, axis=-1)
    assert compared.kl_mean == pytest.approx(divergences.mean(), rel=1e-5)
    assert compared.kl_largest == pytest.approx(divergences.max(), rel=1e-5)
    assert compared.agreement == (reference.argmax(-1) == model.argmax(-1)).mean()


def test_an_error_is_relative_to_the_spread_of_the_logits():
    wanted = torch.tensor([[[10.0, 12.0], [8.0, 12.0]]])
    assert relative_rms([(wanted + 1, wanted)]) == pytest.approx(np.sqrt(4 / 10))


def test_a_number_that_is_none_passes_no_limit():
    for measure in (Measure(np.nan, 1.0), Measure(1.0, np.nan), Measure(np.nan, np.inf)):
        assert not measure.passed
    assert Measure(1.0, 1.0).passed
    assert not Measure(np.nextafter(1.0, 2.0), 1.0).passed
    assert [Measure(0.5, 2.0).ratio, Measure(np.nan, 1.0).ratio] == [0.25, np.inf]
    assert [Measure(value, 0.0).ratio for value in (0.0, 1e-9, np.nan)] == [0.0, np.inf, np.inf]
    assert np.isnan(worst_measure([Measure(0.9, 1.0), Measure(np.nan, 1.0), Measure(3.0, 1.0)]).value)


def test_an_error_of_a_stage_is_relative_to_what_the_stage_adds(tmp_path):
    source = open_source(write_checkpoint(tmp_path / "checkpoint", "llama"))
    reference, ids = Reference(source, ExportOptions(), {}), random_ids(1, 9).numpy()
    generator, last = torch.Generator().manual_seed(0), len(reference.stages) - 1
    outputs, expected, given = [], [], torch.from_numpy(ids)
    for number in range(last + 1):
        (wanted,) = reference.compute_stage(number, [given])
        off = 0.01 * torch.randn(wanted.shape, generator=generator)
        before = {0: torch.zeros(1), last: wanted.mean(-1, keepdim=True)}.get(number, given)
        expected.append(np.linalg.norm(off[0], axis=-1) / np.linalg.norm((wanted - before)[0], axis=-1))
        outputs.append(wanted + off)
        given = outputs[-1]
    (found,) = compute_stage_errors(reference, [ids], [outputs], [2], [WHOLE]).passages
    for errors, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(errors, wanted[2:], rtol=1e-3)


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 16), ("unilm-v2", 8), ("diffllama", 8)])
def test_sequences_that_are_computed_together_are_as_each_alone(tmp_path, kind, kv_bits):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", kind)
    # A code of the cache may fall to its neighbour.
    source, scales, atol = open_source(checkpoint), {}, 1e-5 if kv_bits == 16 else 2e-3
    if kv_bits < 16:
        scales = static_scales(source, kv_bits, cache_ranges(checkpoint, ExportOptions(kv_bits=kv_bits)))
    together, alone = (Reference(source, ExportOptions(kv_bits=kv_bits), scales) for _ in range(2))
    passages = [random_ids(1, length, seed=length).numpy() for length in (20, 9, 33, 250, 1)]
    for logits, ids in zip(together.compute_logits(passages), passages, strict=True):
        torch.testing.assert_close(logits, *alone.compute_logits([ids]), rtol=1e-5, atol=10 * atol)
    generator = torch.Generator().manual_seed(0)
    states = [
        0.5 * torch.randn(1, ids.shape[1], source.architecture.hidden_size, generator=generator) for ids in passages
    ]
    later = [torch.cat([x[:, :-1], -x[:, -1:]], 1) for x in states]
    # The second time, all but the last positions are known.
    for given, firsts in ((states, [0] * 5), (later, [19, 8, 32, 249, 0])):
        wanted = [
            output for x, first in zip(given, firsts, strict=True) for output in alone.compute_stage(1, [x], [first])
        ]
        for output, of_one in zip(together.compute_stage(1, given, firsts), wanted, strict=True):
            torch.testing.assert_close(output, of_one, rtol=1e-5, atol=atol)


def test_values_of_8_bit_codes_are_multiplied_as_the_codes_are(made, monkeypatch):
    _, folder = made(weights="8:g32", embed_bits=8)
    ids = random_ids(2, 9).numpy()
    logits = []
    for most in (2**28, 0):
        monkeypatch.setattr(interface, "_MOST_EXPANDED", most)
        model = OnnxModel(folder, every_position=True, accuracy_level=1, device="cpu")
        logits.append(model.run(ids, np.ones_like(ids), model.allocate_cache(2))[0][0])
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_factors_of_a_disturbance_are_normal_in_each_row_and_each_column():
    disturbance = NoiseSource()
    ones = torch.ones(3, 100, 2000)
    first, second = (((disturbance.add_noise(ones, 2.0**-10) - 1) * 2.0**10).numpy() for _ in range(2))
    again = (NoiseSource().add_noise(ones, 2.0**-10) - 1) * 2.0**10
    np.testing.assert_array_equal(again.numpy(), first)
    for axes in ((0, 1), (2,)):
        # Five standard errors of a mean and of a deviation.
        count = first.size // np.delete(first.shape, axes).prod()
        assert np.abs(first.mean(axes)).max() < 5 / np.sqrt(count)
        assert np.abs(first.std(axes) - 1).max() < 5 / np.sqrt(2 * count)
    assert kurtosis(first.flatten()) == pytest.approx(0, abs=0.2)
    neighbours = [np.corrcoef(first[0, 0], other)[0, 1] for other in (first[0, 1], first[1, 0], second[0, 0])]
    assert np.abs(neighbours).max() < 5 / np.sqrt(2000)


def errors_of(*passages):
    """Errors of one stage at the positions of some passages."""
    return StageErrors(tuple((torch.tensor(values, dtype=torch.float64),) for values in passages))


@in_one_test("passages", [5, 9, 16, 100])
def test_the_typical_limit_is_what_a_median_exceeds_by_four_standard_errors(passages):
    rounded = np.random.default_rng(0).lognormal(size=(passages, 41))
    # The standard error of a median's rank among n is 1 / (2 √n); a passage counts as four.
    share = 0.5 + 4 / (2 * np.sqrt(4 * passages))
    noise = StageNoise(errors_of(*rounded), errors_of(*rounded * 100), errors_of(*rounded * 1000))
    (typical,) = noise.median_error_bounds([0] * passages)
    assert typical == pytest.approx(np.quantile(rounded, share), rel=1e-9)
    (typical,) = noise.median_error_bounds([31] * passages)
    assert typical == pytest.approx(np.quantile(rounded[:, 31:], share), rel=1e-9)


def test_of_few_passages_and_of_calls_far_away_flipped_codes_are_typical():
    rounded, flipped, many = np.random.default_rng(0).lognormal(size=(3, 4, 41))
    noise = StageNoise(errors_of(*rounded), errors_of(*flipped), errors_of(*many))
    assert noise.median_error_bounds([0] * 4) == pytest.approx([np.quantile(flipped, 0.9)], rel=1e-9)
    (typical,), (largest,) = measure_stages(errors_of(*rounded), noise.median_error_bounds([0] * 4), noise.largest)
    assert typical.limit == pytest.approx(4 * np.quantile(flipped, 0.9))
    assert largest.limit == pytest.approx(4 * many.max())
    assert (typical.value, largest.value) == pytest.approx((np.median(rounded), rounded.max()))


def test_routes_count_positions_that_were_read_behind_a_cache_alone(made):
    _, folder = made()
    model = OnnxModel(folder, 1, every_position=True)
    passages = [np.arange(n)[None] % 90 for n in (30, 21)]
    runs = {name: route(model, passages, ("logits",)) for name, route in [(PREFILL, prefill), *iterate_routes(model)]}
    found = {name: [(run.first, run.calls) for run in of_route] for name, of_route in runs.items()}
    assert found == {
        "prefill": [(0, (30,)), (0, (21,))],
        "padded batch": [(0, (27,)), (0, (18,))],
        "chunked prefill": [(15, (15, 15)), (10, (10, 11))],
        "decode": [(25, (25, *[1] * 5))],
        "batch decode": [(27, (27, 1, 1, 1)), (18, (18, 1, 1, 1))],
    }
    # The last logits of a prompt are compared, too, which a folder gives that gives no others.
    found = [(run.first, run.calls) for run in run_last_positions(model, passages)]
    assert found == [(24, (25, *[1] * 5)), (20, (21,))]
    for run, ids in zip(runs["prefill"], passages, strict=True):
        assert run.states[-1].shape[:2] == ids.shape


def test_codes_of_8_bits_at_accuracy_level_1_are_expected_to_keep_activations_as_older_exports_do(made, tmp_path):
    checkpoint, folder = made(weights="8:g32", accuracy_level=1)
    planted = PlantedExport.copy(folder, tmp_path / "older")
    for node in planted.model.graph.node:
        if node.op_type == "MatMulNBits":
            node.domain = "com.microsoft"
            next(each for each in node.attribute if each.name == "accuracy_level").i = 1
    planted.save()
    report = verify(planted.folder, checkpoint, threads=1)
    assert {route.session for route in report.routes} <= {"as exported", "function body"}
    assert max(route.logits.value for route in report.routes if route.logits) < 1e-5


def test_both_columns_of_logits_have_the_limit_that_rounding_gives(made):
    checkpoint, folder = made(weights="4:g32", kv_bits=8)
    report = verify(folder, checkpoint, threads=1)
    by_session = {}
    for route in report.routes:
        by_session.setdefault(route.session, set()).update(measure.limit for measure in route.logit_measures)
    assert len(by_session) >= 2
    assert all(len(limits) == 1 for limits in by_session.values())
    # Far calls are made where activations are not rounded.
    far = {route.session for route in report.routes if route.name == "long context"}
    assert far == {session for session in by_session if session != "int8 activations"}
    rest = [len(route.logit_measures) for route in report.routes if route.name != "long context"]
    assert rest == [2] * 6 * len(by_session)
    assert (report.scales.value, report.scales.limit) == (pytest.approx(0, abs=1e-6), 0.01)
    assert report.rotation.value < 1e-3
    assert report.reached == 96
    assert ("accuracy_level=1" in str(report)) == has_lower_agreement(report.tokens)
    prefills = [route for route in report.routes if route.name == PREFILL]
    # Prefill is itself what others are held to, and not what it is held to.
    assert all(route.against_prefill.value == 0 < route.logits.value for route in prefills)
    tight = min(measure.limit for route in report.routes for measure in route.logit_measures)
    given = verify(folder, checkpoint, tolerance=tight * 50, threads=1)
    assert {measure.limit for route in given.routes for measure in route.logit_measures} == {tight * 50}


def test_calls_whose_logits_have_scales_of_their_own_are_not_held_to_prefill(made):
    checkpoint, folder = made(weights="4:g32", logits="6:tensor")
    routes_of = [route for route in verify(folder, checkpoint, threads=1).routes if route.name != "long context"]
    held = {route.name for route in routes_of if route.against_prefill is not None}
    assert held == {"prefill", "padded batch"}
    rest = {route.name for route in routes_of} - held
    assert rest == {"chunked prefill", "decode", "batch decode", "decode in place"}


@in_one_test("context", [2, 96, 256, 257, 301, 302, 512, 2048, 3000, 131072])
def test_pasts_lead_to_the_last_position(context):
    lengths = list_past_lengths(context)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == context - 1
    powers = [2**power - 1 for power in (10, 14)]
    assert [n for n in (255, 300, *powers) if n < context - 1] == lengths[:-1]


def test_a_cache_of_much_memory_is_not_followed_to_the_end_and_that_is_said(made, monkeypatch):
    checkpoint, folder = made(kv_bits=4)
    layers, as_codes = 2, 8
    row = OnnxModel(folder, 1).cache.bytes_per_token // layers * as_codes
    monkeypatch.setattr(passages, "_MOST_BYTES", 50 * row)
    report = verify(folder, checkpoint, threads=1)
    assert report.reached == 51
    assert "51 of the context's 96 positions were tested" in str(report)


def test_a_long_context_without_a_cache_is_not_read_to_the_end_and_that_is_said(made, monkeypatch):
    checkpoint, folder = made(cache=False)
    monkeypatch.setattr(passages, "_MOST_UNCACHED", 40)
    report = verify(folder, checkpoint, threads=1)
    assert report.reached == 40
    assert "40 of the context's 96 positions were tested: there is no cache" in str(report)
    assert {route.name for route in report.routes} == {"prefill", "padded batch", "long context"}


def test_random_rows_are_as_large_as_a_passages_keys_and_values(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "unilm-v1")
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: x * 3 if "v_proj" in name else x for name, x in weights.items()}, checkpoint / "model.safetensors")
    export(checkpoint, tmp_path / "out", ExportOptions())
    source, model = open_source(checkpoint), OnnxModel(tmp_path / "out", 1)
    passage = np.arange(60)[None] % 90
    _, held = model.run(passage, np.ones_like(passage), model.allocate_cache(1))
    sizes = [np.sqrt(np.mean([np.square(value.numpy()).mean() for value in held[part::2]])) for part in (0, 1)]
    assert sizes[1] > 2 * sizes[0]
    calls = list(run_far_tokens(model, Reference(source, ExportOptions(), {}), [passage], ("logits",)))
    assert [call[0].past.length for call in calls[1:]] == [95]
    past = calls[-1][0].past
    assert [float(x.square().mean().sqrt()) for x in (past.keys, past.values)] == pytest.approx(sizes, rel=0.1)


@in_one_test("context", [96, 40, 3, 1])
def test_passages_differ_in_length_and_fit_the_context(tmp_path, monkeypatch, context):
    monkeypatch.setattr(passages, "LONGEST", 64)
    source = open_source(write_checkpoint(tmp_path / "checkpoint", "llama", max_position_embeddings=context))
    config = SimpleNamespace(max_position_embeddings=context, vocab_size=90)
    lengths = [ids.shape[1] for ids in passages.sample_passages(source, config)]
    assert sum(lengths) >= 128
    assert lengths[0] == max(lengths) == max(1, min(64, context - 1))
    assert min(lengths) >= min(2, context)
    assert context <= 3 or len(set(lengths)) >= 3


def test_tables_of_angles_are_held_to_their_rounding_at_every_position():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=20000)
    rotary = LlamaRotaryEmbedding(config)
    angles = np.arange(20000)[:, None] * 10000.0 ** -(np.arange(8) / 8)

    def excess(sines, cosines=None, positions=20000, dtype=np.float32):
        tables = {"cos_cache": np.cos(angles) if cosines is None else cosines, "sin_cache": sines}
        tensors = [onnx.numpy_helper.from_array(x.astype(dtype), name) for name, x in tables.items()]
        graph = onnx.GraphProto(initializer=tensors)
        return rope_error_ratio(onnx.ModelProto(graph=graph), rotary, positions)

    # In float64 it is another rounding of the same angles.
    assert 0 < excess(np.sin(angles)) < 1
    assert 0 < excess(np.tile(np.sin(angles), 2), np.tile(np.cos(angles), 2)) < 1
    for position in (300, 8191, 19999):
        late = angles + np.where(np.arange(20000) == position, 0.02, 0)[:, None]
        assert excess(np.sin(late), np.cos(late)) > 1
        assert excess(np.sin(late), np.cos(late), dtype=np.float16) > 1
    assert 0.1 < excess(np.sin(angles), dtype=np.float16) < 1
    assert not Measure(excess(np.where(angles == 7.0, np.nan, np.sin(angles))), 1.0).passed
    assert excess(np.sin(angles[:-1])) == np.inf
    assert rope_error_ratio(onnx.ModelProto(), rotary, 20000) is None


def test_an_export_carries_what_calibration_found(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "unilm-v1")
    options = ExportOptions.parse(kv_bits=8)
    ranges = cache_ranges(checkpoint, options)
    write_ranges(tmp_path / "given.safetensors", ranges)
    for name, given in (("found", ranges), ("from a file", tmp_path / "given.safetensors")):
        folder = tmp_path / name
        export(checkpoint, folder, options, ranges=given)
        kept = load_file(folder / RANGES_FILE)
        for layer, scales in read_cache_scales(load_graph(folder)).items():
            for part, scale in zip("kv", scales, strict=True):
                held = np.sort(scale.flatten()) * 127
                np.testing.assert_allclose(held, np.sort(kept[f"layers.{layer}.{part}"].flatten()), rtol=1e-6)
        assert verify(folder, checkpoint, threads=1).scales.passed


def test_a_record_of_calibration_that_was_edited_is_refused(made, tmp_path):
    checkpoint, folder = made(kv_bits=8)
    folder = shutil.copytree(folder, tmp_path / "edited")
    content = bytearray((folder / RANGES_FILE).read_bytes())
    content[-1] ^= 1
    (folder / RANGES_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{RANGES_FILE} changed since export"):
        verify(folder, checkpoint, threads=1)
    (folder / RANGES_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{RANGES_FILE} changed since export"):
        verify(folder, checkpoint, threads=1)


def test_an_older_export_is_verified_and_what_was_not_compared_is_said(made, tmp_path):
    checkpoint, folder = made(kv_bits=8)
    folder = shutil.copytree(folder, tmp_path / "older")
    record = json.loads((folder / "diffquant.json").read_text())
    del record["calibration"]
    (folder / "diffquant.json").write_text(json.dumps(record))
    (folder / RANGES_FILE).unlink()
    report = verify(folder, checkpoint, threads=1)
    assert report.scales is None
    assert "no record of its cache's calibration" in str(report)


def test_a_cache_that_rounds_too_much_in_one_layer_is_refused_without_a_record(made, tmp_path):
    checkpoint, folder = made(kv_bits=8)
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    planted.change("layers.1.k_scale", lambda scales: scales * np.float32(16))
    planted.save()
    record = json.loads((planted.folder / "diffquant.json").read_text())
    del record["calibration"]
    (planted.folder / "diffquant.json").write_text(json.dumps(record))
    with pytest.raises(ToleranceError, match="do not fit the model"):
        verify(planted.folder, checkpoint, threads=1)


@in_one_test(("by", "is_sound"), [(1.009, True), (1.011, False), (0.991, True), (0.989, False)])
def test_a_scale_within_a_hundredth_of_calibrations_is_taken(made, tmp_path, by, is_sound):
    checkpoint, folder = made(kv_bits=8)
    planted = PlantedExport.copy(folder, tmp_path / "planted")

    def one(values):
        values[0, 1, 0, 5] *= by
        return values

    planted.change("layers.1.v_scale", one)
    planted.save()
    if is_sound:
        assert verify(planted.folder, checkpoint, threads=1).passed
    else:
        with pytest.raises(ToleranceError, match="differ from calibration's"):
            verify(planted.folder, checkpoint, threads=1)


def test_a_kernels_folder_is_verified_without_it_too(made, library):
    sessions = {}
    for source, options in (("unilm-v1", {}), ("unilm-v2", {"cache": False}), ("llama", {}), ("llama", {"kv_bits": 8})):
        checkpoint, folder = made(source, **options)
        routes_of = verify(folder, checkpoint, threads=1).routes
        sessions[source, *options] = list(dict.fromkeys(route.session for route in routes_of))
    assert sessions == {
        ("unilm-v1",): ["as exported", "function body"],
        ("unilm-v2", "cache"): ["as exported", "function body"],
        # Its attention over a float cache is ONNX Runtime's own.
        ("llama",): ["as exported"],
        ("llama", "kv_bits"): ["as exported", "function body"],
    }


@in_one_test("cache", [True, False])
def test_progress_comes_to_its_end(made, cache):
    checkpoint, folder = made(cache=cache)
    reported = []
    verify(folder, checkpoint, threads=1, progress=lambda *done: reported.append(done))
    shares = [done / total for done, total, _ in reported]
    assert shares == sorted(shares)
    # Every route counts as one, and all are done before "done" is said.
    assert shares[-2:] == [1, 1]
    assert [what for *_, what in reported].count("as exported, long context") == 1


def test_a_graph_that_cannot_run_at_all_is_an_error_of_the_folder(made, tmp_path):
    checkpoint, folder = made()
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    misshapen = lambda before, after: [onnx.helper.make_node("Reshape", [before, "shape"], [after])]  # noqa: E731
    planted.behind("logits", misshapen, shape=(7, -1, 5))
    planted.save()
    with pytest.raises(CheckpointError, match=r"cannot run .*prefill"):
        verify(planted.folder, checkpoint, threads=1)
