"""The comparison of weight quantizers: equal bits, the codes that `quantize` stores, resumption, missing libraries."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import scipy.stats
import torch

from diffquant.errors import UsageError
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from research.studies import quantizers, rounding, rounding_amounts, rounding_tables
from research.studies.kv_results import KEPT
from research.studies.quantizers import METHODS
from research.studies.rounded_model import RoundingOptions, Subject
from research.studies.rounding_method import TIERS, Method, Quantized, by_itself
from tests.support import tiny_lm

OPTIONS = RoundingOptions(characters=1500, window=64, tokens=512, items=4)
NAMED = {method.name: method for method in METHODS}


def installed(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the extra quantizers: {package}")


# A name, the package that it needs, bits a weight and bits a weight held. A scale has 16 or 32 bits a row, a zero 8.
STORED = [
    ("nearest 4:g32", None, 4.5, 4.5),
    ("mse 4:g128", None, 4.125, 4.125),
    ("nearest 6:g128", None, 6.125, 6.125),
    ("nearest iq4_nl", None, 4.5, 4.5),
    ("mse iq4_xs", None, 4.25, 4.25),
    ("nearest 8:channel", None, 8 + 16 / 512, 8 + 16 / 512),
    ("bitsandbytes nf4, blocks of 64", "bitsandbytes", 4.5, 4.5),
    # 8 bits a block, and float32 for the offset and each 256 blocks.
    ("bitsandbytes nf4, double quantization", "bitsandbytes", *[4 + 8 / 64 + 32 * (2 + 1) / (64 * 512)] * 2),
    ("bitsandbytes int8, rows", "bitsandbytes", 8 + 32 / 512, 8 + 32 / 512),
    ("bitsandbytes LLM.int8, inputs rounded too", "bitsandbytes", 8 + 32 / 512, 8 + 32 / 512),
    ("torchao int4, groups of 64", "torchao", 4.5, 4.5),
    ("torchao int4, groups of 256", "torchao", 4.125, 4.125),
    ("torchao int6, groups of 192", "torchao", 6 + 24 / 256, 8 + 24 / 256),
    ("torchao int8, rows", "torchao", 8 + 24 / 512, 8 + 24 / 512),
    ("HQQ 4 bits, groups of 64", "hqq", 4.5, 4.5),
    ("HQQ 6 bits, groups of 256", "hqq", 6.125, 8.125),
    ("HQQ 8 bits, rows", "hqq", 8 + 32 / 512, 8 + 32 / 512),
]


@pytest.mark.parametrize(
    ("name", "bits", "held"),
    [pytest.param(name, *bits, marks=[installed(package)] if package else []) for name, package, *bits in STORED],
)
def test_stored_bits_count_codes_scales_and_zeros(name, bits, held):
    torch.manual_seed(0)
    weight = torch.randn(64, 512).half()
    made = NAMED[name].over(None)("w", weight)
    assert (made.bits / weight.numel(), made.held / weight.numel()) == (bits, held)
    assert made.values.dtype == torch.float32
    assert (made.values - weight.float()).norm() < 0.2 * weight.float().norm()


# Table of arXiv 2305.14314, appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


@installed("bitsandbytes")
def test_nf4_gives_back_the_papers_levels():
    torch.manual_seed(0)
    weight = torch.randn(4, 64).half()
    made = NAMED["bitsandbytes nf4, blocks of 64"].over(None)("w", weight).values
    largest = weight.float().abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4)
    nearest = levels[(weight.float() / largest).unsqueeze(-1).sub(levels).abs().argmin(-1)] * largest
    torch.testing.assert_close(made, nearest)


@installed("bitsandbytes")
def test_llm_int8_rounds_rows_of_inputs_and_leaves_columns_with_outliers_as_they_are():
    torch.manual_seed(0)
    weight, x = torch.randn(24, 96).half(), torch.randn(5, 96).clamp(-5, 5)
    x[1, 7], x[3, 40] = 9.0, -20.0
    made = NAMED["bitsandbytes LLM.int8, inputs rounded too"].over(None)("w", weight)
    inputs, rows = x.half().numpy().astype(np.float64), weight.numpy().astype(np.float64)
    scale = np.abs(rows).max(1, keepdims=True) / 127
    values = np.round(rows / scale) * scale
    torch.testing.assert_close(made.values, torch.from_numpy(values).float(), rtol=0, atol=float(scale.max()))
    usual = inputs.copy()
    usual[:, [7, 40]] = 0
    step = np.abs(usual).max(1, keepdims=True) / 127
    kept = inputs - usual
    wanted = np.round(usual / step) * step @ values.T + kept @ values.T
    found = made.product(x[None])[0].numpy()
    # A few codes fall to the other side where float16 divides; most of what rounding inputs costs is the same.
    from_rounded, from_exact = (np.sqrt(np.square(found - each).mean()) for each in (wanted, inputs @ values.T))
    assert from_rounded < 0.2 * from_exact


def test_a_product_of_a_methods_own_replaces_the_layers_while_it_is_measured(checkpoint):
    seen = []

    def quantize(name, weight):
        def product(x):
            seen.append(name)
            return x @ weight.float().T * 0

        return Quantized(weight.float(), weight.numel(), weight.numel(), product)

    subject = Subject(checkpoint, RoundingOptions(**{**vars(OPTIONS), "items": 0}))
    row = subject.measured(Method("none", TIERS[0], lambda _: quantize), {})
    assert set(seen) == {source for source, _ in subject._weights.values()}
    assert row["kl"] > 0.1
    exact = subject.measured(Method("exact", TIERS[0], by_itself(lambda w: Quantized(w.float(), 1, 1))), {})
    assert exact["kl"] == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The same model, stored in float16."""
    folder = tmp_path_factory.mktemp("half") / "llama"
    tiny_lm.llama().half().save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


def test_the_weights_are_those_that_quantize_stores(half, tmp_path):
    quantize(half, tmp_path / "out", Recipe.of(weights="4:g16", rounding="mse"))
    stored = load(tmp_path / "out", dtype=torch.float32)
    method = Method("mse", TIERS[0], quantizers.ours("mse", 4, 16))
    subject = Subject(half, OPTIONS)
    with subject._quantized(method) as facts:
        for name, (_, weight) in subject._weights.items():
            assert torch.equal(subject._model.get_parameter(name), stored.get_parameter(name))
            assert not torch.equal(subject._model.get_parameter(name), weight.float())
    assert facts["bits"] == 5.0
    for name, (_, weight) in subject._weights.items():
        assert torch.equal(subject._model.get_parameter(name), weight.float())


def test_a_run_resumes_and_adds_what_is_asked_for(checkpoint, tmp_path, monkeypatch):
    file, calls = tmp_path / "a" / "out.json", []
    whole = Subject._quantized

    def counted(self, method):
        calls.append(method.name)
        return whole(self, method)

    monkeypatch.setattr(Subject, "_quantized", counted)
    without = RoundingOptions(**{**vars(OPTIONS), "items": 0})
    rounding.measure_methods(checkpoint, without, rounding.chosen("nearest 4:g32"), file)
    first = json.loads(file.read_text())["results"]
    assert list(first) == ["16 bits", "nearest 4:g32"]
    assert first["16 bits"]["kl"] == pytest.approx(0, abs=1e-6)
    assert first["nearest 4:g32"]["kl"] > 0
    wanted = rounding.chosen("nearest 4:g32; gptq 4:g32")
    second = rounding.measure_methods(checkpoint, without, wanted, file)["results"]
    assert calls == ["nearest 4:g32", "gptq 4:g32"]
    assert second["gptq 4:g32"]["kl"] < second["nearest 4:g32"]["kl"]
    third = rounding.measure_methods(checkpoint, OPTIONS, wanted[:1], file)
    row = third["results"]["nearest 4:g32"]
    assert row["items"] == 4
    assert all(row[key] == first["nearest 4:g32"][key] for key in (*KEPT, "elsewhere"))
    assert json.loads(file.read_text()) == third
    lines = rounding_tables.method_table(third).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == ["16 bits", "nearest 4:g32", "gptq 4:g32"]
    assert f"| {row['kl']:.4f} ± " in lines[3]
    assert [line.endswith("| - |") for line in lines[2:]] == [False, False, True]


def test_both_texts_keep_the_windows_that_their_means_are_of(checkpoint, tmp_path):
    options = RoundingOptions(**{**vars(OPTIONS), "items": 0})
    result = rounding.measure_methods(checkpoint, options, rounding.chosen("nearest 4:g32"), tmp_path / "out.json")
    row = result["results"]["nearest 4:g32"]
    assert row["kl_by_window"] != row["elsewhere"]["kl_by_window"]
    for scores in (row, row["elsewhere"]):
        weights = scores["tokens_by_window"]
        assert len(weights) == len(scores["kl_by_window"]) > 5
        assert scores["kl"] == pytest.approx(np.average(scores["kl_by_window"], weights=weights))
        assert scores["perplexity"] == pytest.approx(np.exp(np.average(scores["nll_by_window"], weights=weights)))


def _row(kl, tier="4.5 bits"):
    nll = [3 + each for each in kl]
    scores = {"perplexity": float(np.exp(np.mean(nll))), "kl": float(np.mean(kl)), "tokens_by_window": [64] * len(kl)}
    scores |= {"nll_by_window": nll, "kl_by_window": kl}
    return scores | {"tier": tier, "bits": 4.5, "elsewhere": scores | {"kl_by_window": [2 * each for each in kl]}}


def _result(kl_by_name, **old):
    rows = {name: _row(kl) for name, kl in kl_by_name.items()} | old
    full = {"bits": 16.0} | {key: _row([0.0] * 6)[key] for key in (*KEPT, "elsewhere")}
    return {"settings": {"model": "llama"}, "results": {"16 bits": full} | rows}


KL = np.random.default_rng(0).gamma(2, 0.1, (2, 6))


def test_intervals_of_a_table_are_scipys():
    lines = rounding_tables.method_table(_result({"mse 4:g32": KL[0].tolist()})).splitlines()
    mean, sem = KL[0].mean(), scipy.stats.sem(KL[0])
    half = scipy.stats.t.interval(0.95, 5, mean, sem)[1] - mean
    low, high = np.expm1(scipy.stats.t.interval(0.95, 5, mean, sem)) * 100
    change = f"({100 * np.expm1(mean):+.2f} % [{low:+.2f}, {high:+.2f}])"
    assert lines[3].startswith(f"| mse 4:g32 | 4.5 | {np.exp(3 + mean):.3f} {change} | {mean:.4f} ± {half:.4f} | ")
    assert lines[2].startswith("| 16 bits | 16 | 20.086 | 0.0000 | ")


def test_the_best_other_of_mse_reads_no_text_and_windows_are_paired():
    names = ("mse 4:g32", "HQQ 4 bits, groups of 64")
    readers = ("gptq 4:g32", "tuned 4:g32", "AutoRound 4 bits, groups of 32")
    read = {name: (KL[0] / number).tolist() for number, name in enumerate(readers, 2)}
    result = _result(dict(zip(names, KL.tolist(), strict=True)) | read)
    result["results"]["HQQ 6 bits, groups of 256"] = _row((KL[0] / 9).tolist(), "6.125 bits")
    best, prose, elsewhere = rounding_tables.lead(result, "mse 4:g32")
    low, high = scipy.stats.ttest_rel(*KL).confidence_interval(0.95)
    assert best == names[1]
    assert (prose.low, prose.high) == pytest.approx((low, high))
    assert (elsewhere.low, elsewhere.high) == pytest.approx((2 * low, 2 * high))
    assert {rounding_tables.lead(result, name)[0] for name in readers[:2]} == {readers[2]}


def test_another_runs_file_is_refused(checkpoint, tmp_path):
    file = tmp_path / "out.json"
    rounding.measure_methods(checkpoint, OPTIONS, [], file)
    with pytest.raises(UsageError, match="another model, text or setting; name another file"):
        rounding.measure_methods(checkpoint, RoundingOptions(**{**vars(OPTIONS), "characters": 1400}), [], file)
    file.write_text("[]")
    with pytest.raises(UsageError, match="is no result of this program"):
        rounding.measure_methods(checkpoint, OPTIONS, [], file)


def test_a_library_that_is_missing_or_fails_is_named_and_tried_again(checkpoint, tmp_path):
    def absent(weight):
        raise ModuleNotFoundError("No module named 'bitsandbytes'", name="bitsandbytes")

    def failing(weight):
        raise RuntimeError("no such kernel")

    def working(weight):
        return Quantized(weight.float(), weight.numel() * 16, weight.numel() * 16)

    file, name = tmp_path / "out.json", "bitsandbytes nf4, blocks of 64"
    absent, failing, working = (
        Method(name, TIERS[0], by_itself(each), "bitsandbytes") for each in (absent, failing, working)
    )
    result = rounding.measure_methods(checkpoint, OPTIONS, [absent], file)
    assert "not measured: bitsandbytes is not installed: pip install bitsandbytes" in rounding_tables.method_table(
        result
    )
    assert "not measured: RuntimeError: no such kernel" in rounding_tables.method_table(
        rounding.measure_methods(checkpoint, OPTIONS, [failing], file)
    )
    row = rounding.measure_methods(checkpoint, OPTIONS, [working], file)["results"][name]
    assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_an_unknown_method_and_too_short_a_text_are_refused(checkpoint, tmp_path):
    with pytest.raises(UsageError, match=r"no method is called 'awq'; choose from nearest 4:g32; mse"):
        rounding.chosen("nf4;awq")
    (tmp_path / "short.txt").write_text("a short text")
    with pytest.raises(UsageError, match=r"fewer than --tokens 512"):
        Subject(checkpoint, RoundingOptions(text=tmp_path / "short.txt", tokens=512))


def test_a_converted_model_is_quantized_alike_in_both_maps(checkpoint, tmp_path):
    converted = tiny_lm.write_diff_v2(tmp_path / "diff-v2")
    options = RoundingOptions(characters=600, window=64, tokens=256, items=0)
    plain, doubled = (Subject(path, options) for path in (checkpoint, converted))
    for method in rounding.chosen("nearest 4:g32; mse 4:g32; gptq 4:g32"):
        with plain._quantized(method), doubled._quantized(method):
            one, two = (
                each._model.get_parameter("model.layers.1.self_attn.q_proj.weight") for each in (plain, doubled)
            )
            maps = two.view(4, 2, 8, 32)
            assert torch.equal(maps[:, 0], maps[:, 1])
            if method.name != "gptq 4:g32":
                assert torch.equal(maps[:, 0], one.view(4, 8, 32))
    # Its inputs differ in their last bits.
    first, second = (each.measured(method, {}) for each in (plain, doubled))
    assert first["kl"] == pytest.approx(second["kl"], rel=1e-3)


def test_a_text_of_its_own_is_read_and_a_third_one_is_scored(checkpoint, tmp_path):
    read, further = tmp_path / "read.txt", tmp_path / "further.txt"
    read.write_text("Whales sleep upright. " * 200)
    further.write_text("An import statement binds names. " * 100)
    options = RoundingOptions(characters=1500, window=64, tokens=512, items=0, read=read, further=further)
    subject = Subject(checkpoint, options)
    row = subject.measured(NAMED["nearest 4:g32"], {})
    assert len(row["further"]["kl_by_window"]) > 0
    assert not subject.lacking(row)
    assert subject.lacking({key: value for key, value in row.items() if key != "further"})
    plain = Subject(checkpoint, RoundingOptions(characters=1500, window=64, tokens=512, items=0))
    assert subject.settings()["read"] != plain.settings()["read"]
    shortened = subject._reading.shortened(128).windows
    assert shortened.tolist() == subject._reading.windows[:2].tolist()


def test_pieces_come_from_evenly_spaced_places_of_books_that_no_model_was_trained_on(monkeypatch):
    monkeypatch.setattr(rounding_amounts, "_TRAINED_ON", 10)
    monkeypatch.setattr(rounding_amounts, "_PIECES", 3)
    monkeypatch.setattr(rounding_amounts, "_PIECE", 2)
    pieces = rounding_amounts.cut_pieces("0123456789abcdefghi")
    assert sorted(pieces[i : i + 2] for i in range(0, 6, 2)) == ["ab", "de", "gh"]
