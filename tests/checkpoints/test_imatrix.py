"""llama.cpp's importance matrix: read in both formats, written as GGUF, and the weights of mse's errors."""

import json
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import diffquant
from diffquant.checkpoints.calibration import read_calibration
from diffquant.checkpoints.imatrix import read_imatrix
from diffquant.checkpoints.source import open_source
from diffquant.errors import CheckpointError, NonFiniteError, OutputExistsError, UsageError
from diffquant.measure.fidelity import calibration_note
from diffquant.quantization.roundings import calibration_digest
from diffquant.recipe.rounding import RoundingSettings
from tests.checkpoints.test_experts import write_mixture
from tests.support import tiny_lm
from tests.support.gguf_files import write_gguf
from tests.support.models import random_diffllama, random_llama
from tests.support.tables import in_one_test

SIZES = {"vocab_size": tiny_lm.WORDS, "num_hidden_layers": 2, "tie_word_embeddings": False}
READ = {"tokens": 256, "window": 32}


def write(model, folder):
    model.save_pretrained(folder)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write(random_llama(**SIZES, num_key_value_heads=4), tmp_path_factory.mktemp("imatrix") / "llama")


@pytest.fixture(scope="module")
def diffllama(tmp_path_factory):
    return write(random_diffllama(**SIZES), tmp_path_factory.mktemp("imatrix") / "diffllama")


@pytest.fixture(scope="module")
def measured(llama, tmp_path_factory):
    """An imatrix of the Llama, as `calibrate` writes it."""
    file = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    diffquant.calibrate(llama, file, **READ)
    return file


def by_hooks(folder):
    """E[x²] of the inputs of stock transformers' Linears, in float64, by their parameters' names."""
    source = open_source(folder)
    ids = read_calibration(None, source.tokenizer, source.architecture.config, READ["window"], READ["tokens"]).ids
    model, sums = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: sums.update({f"{name}.weight": args[0].square().mean((0, 1))})
            )
    model(ids)
    return sums


def in_gguf(file):
    """The means in an imatrix, by gguf's own reader."""
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    names = {name.rpartition(".")[0] for name in tensors}
    return {name: torch.tensor((tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"])[0]) for name in names}


# The number of sequences, and the data's name.
END = struct.pack("<ii9s", 8, 9, b"books.txt")


def write_binary(file, means, calls=3, end=END):
    """An imatrix in llama.cpp's format of before GGUF."""
    entries = b"".join(
        struct.pack("<i", len(name))
        + name.encode()
        + struct.pack("<ii", calls, len(values))
        + (np.asarray(values, "<f4") * max(calls, 1)).tobytes()
        for name, values in means.items()
    )
    file.write_bytes(struct.pack("<i", len(means)) + entries + end)
    return file


def write_matrix(file, tensors, kind="imatrix", dtype=np.float32):
    """A GGUF file of tensors."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type(kind)
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_llamas_imatrix_has_the_mean_squares_of_stock_transformers_under_llama_cpps_names(llama, measured):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    expected = {names.get_name(name, (".weight",)): values for name, values in by_hooks(llama).items()}
    found = in_gguf(measured)
    assert found.keys() == expected.keys()
    assert {"blk.1.ffn_down.weight", "output.weight"} < found.keys()
    for name, values in found.items():
        torch.testing.assert_close(values.double(), expected[name], rtol=1e-4, atol=1e-9)


def test_a_diff_models_imatrix_has_the_checkpoints_own_names(diffllama, tmp_path):
    diffquant.calibrate(diffllama, tmp_path / "imatrix.gguf", **READ)
    expected, found = by_hooks(diffllama), in_gguf(tmp_path / "imatrix.gguf")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch.testing.assert_close(values.double(), expected[name], rtol=1e-4, atol=1e-9)
    report = diffquant.quantize(diffllama, tmp_path / "low", "4:g32", imatrix=tmp_path / "imatrix.gguf")
    assert report.rounding == "mse"


def test_gguf_reads_what_llama_cpp_looks_for(measured):
    reader = gguf.GGUFReader(measured)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (8, 32)
    assert fields["imatrix.datasets"] == ["the bundled text"]
    shapes = {tensor.name: (tensor.shape.tolist(), tensor.tensor_type.name) for tensor in reader.tensors}
    # A row of channels, and one count of tokens: ne[0] is the width, and ne[1] the number of matrices.
    assert shapes["blk.0.ffn_down.weight.in_sum2"] == ([160, 1], "F32")
    assert shapes["blk.0.ffn_down.weight.counts"] == ([1, 1], "F32")
    assert next(t.data.item() for t in reader.tensors if t.name == "blk.0.ffn_down.weight.counts") == 256


def test_both_formats_give_the_same_codes_and_the_record_names_their_data(llama, measured, tmp_path):
    write_binary(tmp_path / "imatrix.dat", in_gguf(measured))
    records = []
    for file in (measured, tmp_path / "imatrix.dat"):
        diffquant.quantize(llama, tmp_path / file.suffix, "4:g32", imatrix=file)
        records.append(json.loads((tmp_path / file.suffix / "diffquant.json").read_text())["rounding"])
    assert [(each["imatrix"]["datasets"], each["imatrix"]["chunks"]) for each in records] == [
        (["the bundled text"], 8),
        (["books.txt"], 8),
    ]
    assert [each["imatrix"]["digest"] for each in records] == [read_imatrix(measured).digest, read_imatrix(file).digest]
    newer, older = (load_file(tmp_path / name / "model.safetensors") for name in (".gguf", ".dat"))
    assert all(torch.equal(newer[name], older[name]) for name in newer)


def weighted_errors(llama, folder, means):
    weights = load_file(llama / "model.safetensors")
    low = diffquant.load(folder, dtype="float32").state_dict()
    names = {name: gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2).get_name(name, (".weight",)) for name in weights}
    return {
        name: float(((low[name] - weights[name]).double().square() * means[names[name]]).sum())
        for name in weights
        if "proj" in name
    }


@pytest.mark.parametrize("scheme", ["4:g32", "3:row", "nvfp4", "iq4_nl"])
def test_every_tensors_weighted_error_is_smaller_with_an_imatrix(llama, measured, tmp_path, scheme):
    means = in_gguf(measured)
    diffquant.quantize(llama, tmp_path / "plain", scheme, rounding="mse")
    diffquant.quantize(llama, tmp_path / "weighted", scheme, imatrix=measured)
    plain, weighted = (weighted_errors(llama, tmp_path / name, means) for name in ("plain", "weighted"))
    assert len(plain) == 14
    assert all(weighted[name] < plain[name] for name in plain)


def test_load_simulates_what_quantize_writes(llama, measured, tmp_path):
    diffquant.quantize(llama, tmp_path / "low", "4:g32", imatrix=measured)
    recipe = diffquant.Recipe.read(tmp_path / "low/recipe.yaml")
    assert recipe.rounding == RoundingSettings("mse", imatrix=measured)
    simulated, stored = diffquant.load(llama, recipe), diffquant.load(tmp_path / "low")
    for name, values in stored.state_dict().items():
        assert torch.equal(values, simulated.state_dict()[name])
    note = calibration_note(open_source(tmp_path / "low"), [])
    assert (
        note
        == "the candidate was rounded by an imatrix of the bundled text, so it is unknown how much of that was scored"
    )


def test_a_sweeps_cell_depends_on_the_files_content(llama, measured, tmp_path):
    source, file = open_source(llama), tmp_path / "imatrix.dat"
    digests = set()
    for value in (1.0, 2.0, 1.0):
        write_binary(file, {"blk.0.attn_q.weight": [value]})
        digests.add(calibration_digest(source, RoundingSettings("mse", imatrix=file)))
    assert len(digests) == 2


def test_weights_chosen_by_name_find_llama_cpps_names(llama, measured, tmp_path):
    for name, options in (("known", {}), ("unknown", {"weights_only": True})):
        diffquant.quantize(llama, tmp_path / name, "4:g32", imatrix=measured, **options)
    known, unknown = (load_file(tmp_path / name / "model.safetensors") for name in ("known", "unknown"))
    packed = [name for name in known if name.endswith("weight_packed")]
    assert packed
    assert all(torch.equal(known[name], unknown[name]) for name in packed)


def test_a_gguf_source_takes_an_imatrix(llama, measured, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama)
    report = diffquant.quantize(tmp_path / "tiny.gguf", tmp_path / "low.gguf", "4:g32", imatrix=measured, to="gguf")
    assert report.rounding == "mse"


def test_the_command_line_writes_one_and_rounds_by_it(llama, tmp_path, run):
    file = tmp_path / "imatrix.gguf"
    code, out, err = run("calibrate", llama, "-o", file, "--tokens", 64, "--window", 32)
    assert code == 0, err
    assert out == (
        f"{file}: importance of the inputs of 15 weights, over 2 windows of the bundled text\nwrote {file}\n"
    )
    code, out, _ = run("calibrate", llama, "-o", file, "--tokens", 64, "--window", 32, "--overwrite", "--json")
    assert json.loads(out)["chunks"] == 2
    code, out, err = run("quantize", llama, "-o", tmp_path / "low", "--imatrix", file)
    assert code == 0, err
    assert " stored bits each by mse, " in out
    code, out, err = run("quantize", llama, "-o", tmp_path / "b", "--effort", "balanced", "--imatrix", file)
    assert code == 2
    assert err.endswith("\nerror: rounding gptq has no imatrix; leave it out, or use mse\n")


@in_one_test("rounding", ["nearest", "gptq", "tuned"])
def test_other_rules_refuse_an_imatrix(llama, measured, tmp_path, rounding):
    with pytest.raises(UsageError, match=f"rounding {rounding} has no imatrix; leave it out, or use mse"):
        diffquant.quantize(llama, tmp_path / "low", "4:g32", rounding=rounding, imatrix=measured)
    with pytest.raises(UsageError, match="mse' rounds row by row"):
        diffquant.quantize(llama, tmp_path / "low", "8:tensor", imatrix=measured)


@in_one_test("given", [{"imatrix": "none.gguf"}, {"tokens": 100, "seed": 1}])
def test_what_only_weights_need_is_refused_where_none_is_rounded(llama, tmp_path, given):
    names = " and ".join(given)
    with pytest.raises(UsageError, match=f"leave out {names}, or give weights=.*, and this recipe rounds none"):
        diffquant.quantize(llama, tmp_path / "low", {"kv": 8}, **given)


def test_experts_in_one_tensor_are_refused(tmp_path, measured):
    write_mixture(tmp_path / "mixture", "qwen3_moe", stacked=True)
    with pytest.raises(UsageError, match=r"imatrix needs the inputs of Linears, but model\.layers\.0\..* one tensor"):
        diffquant.quantize(tmp_path / "mixture", tmp_path / "low", "4:g32", imatrix=measured)


def test_an_imatrix_is_the_name_of_a_file_in_a_recipe_and_a_path_in_python():
    with pytest.raises(UsageError, match="imatrix must be the name of a file, got 7"):
        RoundingSettings.parse({"name": "mse", "imatrix": 7})
    with pytest.raises(UsageError, match="imatrix must be the Path of a file, got 'imatrix"):
        RoundingSettings("mse", imatrix="imatrix.gguf")


def test_entries_that_do_not_fit_are_named(llama, measured, tmp_path, caplog):
    means = in_gguf(measured)
    file = tmp_path / "imatrix.dat"
    narrow = means | {"blk.1.ffn_down.weight": means["blk.0.attn_q.weight"]}
    with pytest.raises(
        CheckpointError,
        match=r"not an imatrix of this model: blk\.1\.ffn_down\.weight has 64 values, and "
        r"model\.layers\.1\.mlp\.down_proj\.weight has 160 input channels$",
    ):
        diffquant.quantize(llama, tmp_path / "low", "4:g32", imatrix=write_binary(file, narrow))
    few = {name: values for name, values in means.items() if ".attn" not in name}
    with pytest.raises(
        CheckpointError,
        match=r"has no activations for 8 of 14 weights: model\.layers\.0\.self_attn\.k_proj.* and 3 more; use",
    ):
        diffquant.quantize(llama, tmp_path / "low", "4:g32", imatrix=write_binary(file, few))
    assert not (tmp_path / "low").exists()
    recipe = {"weights": "4:g32", "overrides": {"*.self_attn.*": "16"}}
    more = few | {"blk.7.attn_q.weight": [1.0]}
    diffquant.quantize(llama, tmp_path / "low", recipe, imatrix=write_binary(file, more))
    assert "has entries for 1 tensors that this model does not have, which are ignored: blk.7.attn_q" in caplog.text


GOOD = {"a.weight.in_sum2": [[1.0, 2.0]], "a.weight.counts": [[4.0]]}


@in_one_test(
    ("tensors", "kind", "message"),
    [
        (GOOD, "model", "general.type 'model', not 'imatrix'"),
        ({"a.weight": [1.0]}, "imatrix", r"no tensor NAME\.in_sum2"),
        ({"a.weight.in_sum2": [[1.0]], "b.weight.counts": [[1.0]]}, "imatrix", r"missing for a\.weight, b\.weight"),
        (GOOD | {"a.weight.in_sum2": [[1.0, -2.0]]}, "imatrix", "a.weight has negative or non-finite values"),
        (GOOD | {"a.weight.in_sum2": [[1.0, np.inf]]}, "imatrix", "a.weight has negative or non-finite values"),
        (GOOD | {"a.weight.counts": [[np.nan]]}, "imatrix", "a.weight has negative or non-finite values"),
        (GOOD | {"a.weight.counts": [[1e-40]]}, "imatrix", "a.weight has a count of tokens between 0 and 1"),
        (GOOD | {"a.weight.counts": [[1.0], [1.0], [1.0]]}, "imatrix", "a.weight has 2 values and 3 counts"),
    ],
)
def test_a_gguf_file_that_is_wrong_is_named_with_the_entry(tmp_path, tensors, kind, message):
    file = write_matrix(tmp_path / "imatrix.gguf", tensors, kind)
    with pytest.raises(CheckpointError, match=rf"cannot read {file} as an imatrix: .*{message}"):
        read_imatrix(file)


def test_a_gguf_file_of_another_type_or_cut_off_is_named(tmp_path, measured):
    write_matrix(tmp_path / "half.gguf", GOOD, dtype=np.float16)
    with pytest.raises(CheckpointError, match=r"a\.weight\.in_sum2 is F16, not F32"):
        read_imatrix(tmp_path / "half.gguf")
    (tmp_path / "cut.gguf").write_bytes(measured.read_bytes()[:-400])
    with pytest.raises(CheckpointError, match=r"cut\.gguf as an imatrix: it ends at byte"):
        read_imatrix(tmp_path / "cut.gguf")


def test_tensors_that_overlap_are_refused(tmp_path):
    file = write_matrix(tmp_path / "a.gguf", {f"a.{part}": np.ones((1, 4096)) for part in ("in_sum2", "counts")})
    content = file.read_bytes()
    file.write_bytes(content[: -4 * 4096].replace(struct.pack("<Q", 4 * 4096), struct.pack("<Q", 0)))
    with pytest.raises(CheckpointError, match="its tensors overlap"):
        read_imatrix(file)


NAMED = struct.pack("<ii1sii", 1, 1, b"a", 2, 1)


@in_one_test(
    ("content", "message"),
    [
        (b"\1\0", "cut off at byte 0 of 2, before the number of entries"),
        (struct.pack("<i", 0), "the number of entries, at byte 0, is 0"),
        (struct.pack("<ii", 1, 2**31 - 1), "the name of entry 1 of 1 has 2147483647 bytes, and the file ends after 0"),
        (struct.pack("<ii", 1, -1), "the length of the name of entry 1 of 1, at byte 4, is -1"),
        (struct.pack("<ii1si", 1, 1, b"a", -2), r"number of sequences of entry 1 of 1 \(a\), at byte 9, is -2"),
        (struct.pack("<ii1sii", 1, 1, b"a", 2, 2**31 - 1), r"entry 1 of 1 \(a\) has 8589934588 bytes, and the file e"),
        (NAMED + struct.pack("<f", -1.0), "a has negative or non-finite values"),
        (NAMED + struct.pack("<f", float("nan")), "a has negative or non-finite values"),
        (NAMED + struct.pack("<fi", 1.0, 5), "cut off at byte 25 of 25, before the length of the data's name"),
        (NAMED + struct.pack("<fii", 1.0, 5, 99), "the data's name has 99 bytes, and the file ends after 0"),
        (struct.pack("<i", 2) + 2 * (NAMED[4:] + struct.pack("<f", 1.0)), "more than one entry for a"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    ],
)
def test_an_older_file_that_is_wrong_is_named_with_the_entry(tmp_path, content, message):
    file = tmp_path / "imatrix.dat"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"cannot read {file} as an imatrix: .*{message}"):
        read_imatrix(file)


def test_a_file_without_data_at_its_end_and_without_calls_has_means(tmp_path):
    read = read_imatrix(write_binary(tmp_path / "imatrix.dat", {"a": [1.0, 3.0]}, calls=0, end=b""))
    assert (read.means["a"].tolist(), read.datasets, read.chunks) == ([1.0, 3.0], (), 0)


def test_experts_have_their_own_counts_and_those_without_tokens_importance_1(tmp_path):
    tensors = {"a.in_sum2": [[2.0, 4.0], [0.0, 0.0]], "a.counts": [[2.0], [0.0]]}
    unused = {"b.in_sum2": [[0.0]], "b.counts": [[0.0]]}
    means = read_imatrix(write_matrix(tmp_path / "imatrix.gguf", tensors | unused)).means
    assert {name: values.tolist() for name, values in means.items()} == {"a": [1.0, 2.0, 1.0, 1.0]}


@pytest.mark.parametrize("what", ["absent", "folder", "empty"])
def test_no_file_is_one_clear_error(llama, tmp_path, what):
    file = tmp_path / "imatrix.gguf"
    if what == "folder":
        file.mkdir()
    elif what == "empty":
        file.touch()
    with pytest.raises(CheckpointError, match=f"cannot read {file}"):
        diffquant.quantize(llama, tmp_path / "low", "4:g32", imatrix=file)


def test_an_importance_of_any_magnitude_gives_the_same_codes(llama, measured, tmp_path):
    means, written = in_gguf(measured), []
    for power in (0, -80, 80):
        file = write_binary(tmp_path / "imatrix.dat", {name: values * 2.0**power for name, values in means.items()}, 1)
        diffquant.quantize(llama, tmp_path / str(power), "4:g32", imatrix=file)
        written.append((tmp_path / str(power) / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]
    zeros = write_binary(tmp_path / "zeros.dat", {name: values * 0 for name, values in means.items()})
    diffquant.quantize(llama, tmp_path / "zeros", "4:g32", imatrix=zeros)


def test_calibrate_refuses_what_it_cannot_write(llama, measured, tmp_path):
    with pytest.raises(UsageError, match=r"targets and bits set how ranges are found, but a \.gguf output is an impor"):
        diffquant.calibrate(llama, tmp_path / "imatrix.gguf", targets="k", bits=4)
    with pytest.raises(OutputExistsError, match=r"imatrix\.gguf exists"):
        diffquant.calibrate(llama, measured, **READ)
    model = write_gguf(tmp_path / "model.gguf", llama)
    with pytest.raises(OutputExistsError, match=r"model\.gguf, which diffquant did not write"):
        diffquant.calibrate(llama, model, **READ, overwrite=True)
    with pytest.raises(UsageError, match=r"imatrix\.dat: write an importance matrix as imatrix\.gguf, or ranges"):
        diffquant.calibrate(llama, tmp_path / "imatrix.dat", **READ)
    assert not (tmp_path / "imatrix.dat").exists()
    diffquant.quantize(llama, tmp_path / "low", "4:g32", rounding="mse")
    with pytest.raises(CheckpointError, match="low is quantized; an imatrix is measured on the 16-bit checkpoint"):
        diffquant.calibrate(tmp_path / "low", tmp_path / "imatrix.gguf", **READ)


def test_a_model_that_overflows_is_named(tmp_path):
    model = random_llama(**SIZES)
    model.model.layers[1].mlp.up_proj.weight.data *= 1e36
    write(model, tmp_path / "large")
    with pytest.raises(
        NonFiniteError, match=r"inputs of .*model\.layers\.1\.mlp\.down_proj.* are NaN, infinite or too large"
    ):
        diffquant.calibrate(tmp_path / "large", tmp_path / "imatrix.gguf", **READ)
    assert not (tmp_path / "imatrix.gguf").exists()
