"""What `import diffquant` gives a Python program."""

import gc
import importlib.util
import inspect
import itertools
import re
import sys

import pytest
import torch

import diffquant
from diffquant import data, verbs
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from diffquant.support import progress as progress_module
from tests.support.checkpoints import write_checkpoint, write_llama
from tests.support.tables import in_one_test

VERBS = [
    *("calibrate", "compare", "convert", "evaluate", "export", "generate", "inspect", "load", "outliers"),
    *("plan", "quantize", "run", "search", "sweep", "verify"),
]
IDS = torch.arange(11)[None]


@pytest.fixture(scope="module")
def pocket():
    (path,) = (path for path in data.pocket_models("needle") if path.name == "needle-diff-v1")
    return path


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source", "unilm-v2", torch.float32, vocab_size=97)


def test_dir_and_help_show_the_public_names():
    assert dir(diffquant) == sorted(diffquant.__all__)
    assert set(VERBS) < set(dir(diffquant))
    assert all(f"`{verb}`" in diffquant.__doc__ for verb in VERBS)


@in_one_test("verb", VERBS)
def test_a_verb_states_its_arguments_and_shows_an_example(verb):
    function = inspect.unwrap(getattr(diffquant, verb))
    assert inspect.signature(getattr(diffquant, verb)) == inspect.signature(function)
    documentation = inspect.getdoc(function)
    assert f"diffquant.{verb}(" in documentation
    entries = re.search(r"^Args:\n((?: {4}.*\n|\n)*)", documentation, re.MULTILINE)[1]
    stated = {name for line in re.findall(r"^ {4}(\w[\w, ]*): \S", entries, re.MULTILINE) for name in line.split(", ")}
    assert stated == inspect.signature(function).parameters.keys()
    assert "Raises:" in documentation


def test_verbs_name_the_types_of_other_rooms_without_importing_them(monkeypatch):
    packages = ("benchmarks", "calib", "measure", "model", "onnx")
    rooms = tuple(f"diffquant.{package}." for package in packages)
    for name in [name for name in sys.modules if name.startswith(rooms)]:
        monkeypatch.delitem(sys.modules, name)
    for verb in itertools.chain(*verbs.GROUPS.values()):
        spec = importlib.util.find_spec(verb.__module__)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert not [name for name in sys.modules if name.startswith(rooms)]


@in_one_test(
    ("given", "expected"),
    [
        ("4:g32", {"weights": "4:g32"}),
        (8, {"weights": "8:g32"}),
        ({"weights": "4:g32", "kv": 8}, {"weights": "4:g32", "k": "8:row", "v": "8:row"}),
        ({"kv": 8, "k": "4:c64"}, {"k": "4:c64", "v": "8:row"}),
    ],
)
def test_a_recipe_is_read_from_what_the_command_line_takes(given, expected):
    recipe = diffquant.Recipe.parse(given)
    assert recipe.to_dict() == diffquant.Recipe().to_dict() | expected
    assert diffquant.Recipe.parse(recipe) is recipe


def test_a_recipe_is_read_from_a_file_and_nothing_else(tmp_path):
    (tmp_path / "recipe.yaml").write_text("kv: 8\nrounding: mse\n")
    assert diffquant.Recipe.parse(tmp_path / "recipe.yaml") == diffquant.Recipe.of(kv=8, rounding="mse")
    with pytest.raises(UsageError, match="a recipe is a weight scheme"):
        diffquant.Recipe.parse(["4:g32"])
    with pytest.raises(UsageError, match="did you mean 'weights'"):
        diffquant.Recipe.parse({"weigths": 4})


@in_one_test(
    "text",
    [
        "Recipe.of()",
        "Recipe.of(weights='4:g32')",
        "Recipe.of(weights='4:g32', kv='8:row')",
        "Recipe.of(k='4:c64', v='8:row', logits='6:row:shift')",
        "Recipe.of(weights='4:g32', kv='8:row', residual=64, overrides={'*.mlp.*': '6:row'}, rounding='mse')",
    ],
)
def test_a_recipe_is_shown_as_the_expression_that_makes_it(text):
    recipe = eval(text, {"Recipe": diffquant.Recipe})
    assert repr(recipe) == text


def test_texts_and_mappings_quantize_as_the_recipe_they_stand_for(tmp_path, source):
    diffquant.quantize(source, tmp_path / "text", "4:g32", rounding="mse")
    diffquant.quantize(source, tmp_path / "recipe", diffquant.Recipe.of(weights="4:g32", rounding="mse"))
    assert open_source(tmp_path / "text").fingerprint == open_source(tmp_path / "recipe").fingerprint
    simulated = diffquant.load(source, {"weights": "4:g32", "rounding": "mse"}, dtype="float32")
    assert torch.equal(simulated(IDS).logits, diffquant.load(tmp_path / "text", dtype="float32")(IDS).logits)


def test_progress_is_shown_in_a_terminal_and_nowhere_else(tmp_path, source, monkeypatch, capsys):
    diffquant.quantize(source, tmp_path / "silent", "4:g32")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True, raising=False)
    diffquant.quantize(source, tmp_path / "shown", "4:g32")
    assert "quantize" in capsys.readouterr().err


def test_verbs_measure_and_run_what_they_are_given(tmp_path, pocket):
    result = diffquant.evaluate(pocket, "needle", {"logits": "6:row"}, limit=4, lengths="64", dtype="float32")
    assert list(result) == ["needle:1:1"]
    swept = diffquant.sweep(
        pocket, tmp_path / "sweep", "needle", bits="8", targets="logits", limit=4, lengths="64", dtype="float32"
    )
    assert [cell.point.label for cell in swept.cells] == ["16 bits", "logits 8:row"]
    assert (tmp_path / "sweep/report.html").is_file()
    fits = diffquant.calibrate(pocket, tmp_path / "scales.safetensors", targets="k,v", tokens=128, window=32)
    static = diffquant.load(pocket, {"kv": "8:static"}, scales=tmp_path / "scales.safetensors")
    assert {fit.target for fit in fits} == {"k", "v"}
    assert static(IDS).logits.isfinite().all()


def test_generate_takes_a_checkpoint_or_a_loaded_model(pocket):
    model, tokenizer = diffquant.load(pocket), diffquant.load_tokenizer(pocket)
    text = diffquant.generate(pocket, "The city", max_new_tokens=5)
    pieces = []
    given = {"tokenizer": tokenizer, "max_new_tokens": 5, "on_text": pieces.append}
    assert text == diffquant.generate(model, "The city", **given) == "".join(pieces) != ""
    with pytest.raises(UsageError, match="needs its tokenizer"):
        diffquant.generate(model, "The city")


@pytest.mark.parametrize("kind", ["unilm-v1", "unilm-v2", "diffllama", "phi4flash", "motif3"])
def test_a_model_on_disk_computes_as_one_in_memory(tmp_path, kind):
    checkpoint = write_checkpoint(tmp_path / "source", kind, torch.float32)
    whole = diffquant.load(checkpoint, {"weights": "6:row", "kv": 8})
    children = [name for name, _ in whole.model.named_children() if name != "layers"]
    places = {"lm_head": "cpu"} | {f"model.{name}": "cpu" for name in children}
    places |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(len(whole.model.layers))}
    spreading = {"device_map": places, "offload_folder": tmp_path / "offload"}
    spread = diffquant.load(checkpoint, {"weights": "6:row", "kv": 8}, **spreading)
    on_disk = [name for name, parameter in spread.named_parameters() if parameter.is_meta]
    assert on_disk
    assert not [name for name in on_disk if not name.startswith("model.layers.") or ".layers.0." in name]
    torch.testing.assert_close(spread(IDS).logits, whole(IDS).logits, rtol=0, atol=1e-6)
    made = [model.generate(IDS, max_new_tokens=4, do_sample=False) for model in (spread, whole)]
    assert torch.equal(*made)


def test_a_model_larger_than_the_memory_it_is_given_goes_to_disk(tmp_path):
    checkpoint = write_llama(tmp_path / "source", num_hidden_layers=6)
    whole = diffquant.load(checkpoint)
    nbytes = sum(parameter.nbytes for parameter in whole.parameters())
    spread = diffquant.load(
        checkpoint, device_map="auto", max_memory={"cpu": nbytes // 2}, offload_folder=tmp_path / "offload"
    )
    in_memory = sum(parameter.nbytes for parameter in spread.parameters() if not parameter.is_meta)
    assert 0 < in_memory <= nbytes // 2
    torch.testing.assert_close(spread(IDS).logits, whole(IDS).logits, rtol=0, atol=1e-6)


def test_a_device_map_that_cannot_serve_is_refused_before_anything_is_read(tmp_path, source):
    folder = {"offload_folder": tmp_path / "offload"}
    for given, said in (
        ({"device_map": {"model.layers": "disk", "": "cpu"}}, "give offload_folder"),
        ({"device_map": {"model.layers": "cpu"}}, "no place for"),
        ({"device_map": {"": "disk"}} | folder, r"puts model\.embed_tokens on a place that does not compute"),
        ({"device_map": {"": "cpu", "model.layer.1": "cpu"}}, r"that the model does not have: model\.layer\.1$"),
        ({"device": "cpu", "device_map": "auto"}, "leave out device or device_map"),
        ({"device_map": torch.device("cpu")}, "device_map must be 'auto' or a mapping from modules to devices"),
        (folder, "give device_map='auto' too"),
        ({"max_memory": {"cpu": "1GB"}}, "max_memory needs a device map: give device_map='auto' too"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "cannot read max_memory {'cpu': 'much'}"),
        ({"packed": True, "device_map": "auto"}, "leave out packed"),
    ):
        with pytest.raises(UsageError, match=said):
            diffquant.load(source, **given)


def test_models_that_share_an_offload_folder_keep_their_own_weights_and_leave_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, places = tmp_path / "offload", {"": "cpu", "model.layers.1": "disk"}
    checkpoint = write_checkpoint(tmp_path / "source", "unilm-v1", torch.float32)
    spread = diffquant.load(checkpoint, device_map=places, offload_folder="offload")
    monkeypatch.chdir(tmp_path.parent)
    other = diffquant.load(checkpoint, "4:row", device_map=places, offload_folder=folder)
    torch.testing.assert_close(spread(IDS).logits, diffquant.load(checkpoint)(IDS).logits, rtol=0, atol=1e-6)
    del spread, other
    gc.collect()
    assert not list(folder.iterdir())


def test_the_weights_that_stay_unpacked_take_16_bits(tmp_path, source):
    report = diffquant.quantize(source, tmp_path / "four", "4:g32")
    dtypes = {info.dtype for name, info in open_source(tmp_path / "four").checkpoint.tensors.items() if "embed" in name}
    assert dtypes == {torch.bfloat16}
    wide = diffquant.quantize(source, tmp_path / "wide", "4:g32", dtype="float32")
    assert wide.bytes_after > report.bytes_after
    before, after = (open_source(path).checkpoint for path in (source, tmp_path / "wide"))
    assert torch.equal(before.read("model.embed_tokens.weight"), after.read("model.embed_tokens.weight"))
    assert diffquant.load(tmp_path / "four").dtype == diffquant.load(source).dtype == torch.float32


def test_a_value_beyond_float16_is_refused_where_float16_is_asked_for(tmp_path, source):
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 5] = 1e5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(diffquant.DiffQuantError, match=r"model\.embed_tokens\.weight .*100000, which overflow"):
        diffquant.quantize(source, tmp_path / "out", "4:g32", dtype="float16")
    diffquant.quantize(source, tmp_path / "out", "4:g32")
