"""Code of strangers in folders: what transformers would run is refused before a server starts, and no output names it.

The oracle is transformers itself, told to trust a folder in a process of its own, as vLLM is.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoTokenizer

import diffquant
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import CheckpointError
from diffquant.measure.sweep.workers import WorkerProcess
from diffquant.quantization.engine_folder import MODELLING_FILES, make_auto_map, make_modelling_text
from diffquant.quantization.foreign_code import remove_code_entries
from diffquant.serving.plan import plan_server
from tests.serving.test_plan import ASKED, MODELLING_FILE, POCKET, vllm  # noqa: F401
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.tables import in_one_test

FOLDER = ASKED | {"implementation": "folder"}
EVIL = """\
open({mark!r}, "w").close()
from transformers import PreTrainedConfig, ProcessorMixin, TokenizersBackend
class Evil(PreTrainedConfig):
    model_type = "diff_v2"
class EvilTokenizer(TokenizersBackend):
    pass
def generate(*arguments, **options):
    pass
"""
TRUSTING = """\
import json, sys
import transformers
for kind, folder in json.loads(sys.argv[1]):
    try:
        getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True)
    except Exception as error:
        print(folder, repr(error)[:300])
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A folder as diffquant writes it, with a tokenizer."""
    place = tmp_path_factory.mktemp("ours")
    source = write_checkpoint(place / "source", "unilm-v2")
    tiny_lm.tokenizer().save_pretrained(source)
    diffquant.quantize(source, place / "model", {"weights": "8:row"})
    return place / "model"


def trusted(calls, folder):
    """Open folders by transformers where it is told to trust them, each with a class of its own."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    asked = json.dumps([[kind, str(place)] for kind, place in calls])
    done = subprocess.run(
        [sys.executable, "-c", TRUSTING, asked], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def injected(model, evil):
    name = f'x"; open({str(evil / "ran-injected")!r}, "w").close(); Z = "'
    edit_json(model / "config.json", model_type=name)
    (model / MODELLING_FILE).write_text(
        make_modelling_text(MODELLING_FILE, "diff_v2").replace('MODEL_TYPE = "diff_v2"', f'MODEL_TYPE = "{name}"')
    )


def named(file, reference, kind="AutoConfig"):
    def change(model, evil):
        content = json.loads((model / file).read_text()) if (model / file).exists() else {}
        value = reference.format(evil=evil)
        auto_map = content.get("auto_map", {}) | {kind: [None, value] if kind == "AutoTokenizer" else value}
        (model / file).write_text(json.dumps(content | {"auto_map": auto_map}))

    return change


def linked(model, evil):
    (model / "sub").symlink_to(evil)
    named("config.json", "sub/code.Evil")(model, evil)


def redirected(model, evil):
    other = json.loads((model / "config.json").read_text())
    other["auto_map"] = {"AutoConfig": f"{evil}--code.Evil"}
    (model / "config.1.0.json").write_text(json.dumps(other))
    edit_json(model / "config.json", configuration_files=["config.1.0.json"])


def generating(model, evil):
    (model / "custom_generate").mkdir()
    shutil.copy(evil / "code.py", model / "custom_generate/generate.py")


def twice(model, evil):
    text = (model / "tokenizer_config.json").read_text().strip().removesuffix("}")
    reference = json.dumps({"AutoTokenizer": [None, f"{evil}--code.EvilTokenizer"]})
    (model / "tokenizer_config.json").write_text(f'{text}, "auto_map": {{}}, "auto_map": {reference}}}')


RUN = {
    "injected": ("AutoConfig", injected),
    "beside": ("AutoConfig", named("config.json", "evil--code.Evil")),
    "absolute": ("AutoConfig", named("config.json", "{evil}--code.Evil")),
    "inside": ("AutoConfig", named("config.json", "{evil}/code.Evil")),
    "tokenizer": ("AutoTokenizer", named("tokenizer_config.json", "{evil}--code.EvilTokenizer", "AutoTokenizer")),
    "processor": ("AutoProcessor", named("processor_config.json", "{evil}--code.Evil", "AutoProcessor")),
    "preprocessor": ("AutoProcessor", named("preprocessor_config.json", "{evil}--code.Evil", "AutoProcessor")),
    "linked": ("AutoConfig", linked),
    "redirected": ("AutoConfig", redirected),
    "generating": ("AutoModelForCausalLM", generating),
    "twice": ("AutoTokenizer", twice),
}


def attacked(ours, place, name, change):
    """A copy of a folder with an attack in it, and the file that the attack makes."""
    evil = place / ("evil" if name == "beside" else f"evil-{name}")
    evil.mkdir()
    mark = evil / f"ran-{name}"
    (evil / "code.py").write_text(EVIL.format(mark=str(mark)))
    model = shutil.copytree(ours, place / name)
    change(model, evil)
    return model, mark


def test_what_transformers_would_run_is_refused(vllm, ours, tmp_path):  # noqa: F811
    calls, marks = [], {}
    for name, (kind, change) in RUN.items():
        model, marks[name] = attacked(ours, tmp_path, name, change)
        calls.append((kind, model))
        with pytest.raises(
            CheckpointError,
            match=r"code that is not this version of diffquant's|no modelling file|leads vLLM|gives 'auto_map' twice",
        ):
            plan_server(model, **FOLDER)
    assert not any(mark.exists() for mark in marks.values())
    printed = trusted(calls, tmp_path)
    assert [name for name, mark in marks.items() if not mark.exists()] == [], printed


def changed(file, **changes):
    return lambda model: edit_json(model / file, **changes)


def written(file, content="", where=MODELLING_FILE):
    def change(model):
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text(content or (model / where).read_text())

    return change


REFUSED = {
    "a nested config": (changed("config.json", text_config={"auto_map": {"AutoModel": "a.B"}}), "auto_map"),
    "a list": (changed("tokenizer_config.json", auto_map=["a.B", None]), "tokenizer_config.json with auto_map"),
    "none": (changed("config.json", auto_map=None), "auto_map null"),
    "more": (
        changed("config.json", auto_map=make_auto_map(MODELLING_FILE) | {"AutoModelForSequenceClassification": "a.B"}),
        "auto_map",
    ),
    "architectures": (changed("config.json", architectures=["KimiK25ForConditionalGeneration"]), "KimiK25"),
    "pipelines": (changed("config.json", custom_pipelines={"x": {"impl": "a.B"}}), "custom_pipelines"),
    "kernels": (changed("config.json", _attn_implementation="evilorg/kernel"), "_attn_implementation"),
    "nested kernels": (changed("config.json", attn_implementation={"": "sdpa", "x": "a/b:c"}), "attn_implementation"),
    "a class": (changed("tokenizer_config.json", tokenizer_class="Evil"), "tokenizer_class"),
    "no class": (changed("tokenizer_config.json", tokenizer_class="AutoModel"), "tokenizer_class"),
    "generation": (written("generation_config.json", '{"custom_generate": "a/b"}'), "custom_generate"),
    "deeper": (written("deeper/x.JSON", '{"auto_map": "a--b.C"}'), r"deeper/x\.JSON with auto_map"),
    "no JSON": (written("processor_config.json", "{"), "processor_config.json, which cannot be read"),
    "our text elsewhere": (written("deeper/modeling_diffquant.py"), "deeper/modeling_diffquant.py"),
    "upper case": (written("helper.PY"), "helper.PY"),
    "compiled": (written("__pycache__/modeling_diffquant.cpython-311.pyc"), "pyc"),
    "native": (written("torch.cpython-311-x86_64-linux-gnu.so"), "so"),
    "a pickle": (written("pytorch_model.bin"), "a pickle"),
    "hidden": (written(".hidden/x.py"), "x.py"),
}


@in_one_test("change", REFUSED)
def test_code_is_refused_wherever_a_folder_has_or_names_it(vllm, ours, tmp_path, change):  # noqa: F811
    model = shutil.copytree(ours, tmp_path / "model")
    make, problem = REFUSED[change]
    make(model)
    with pytest.raises(CheckpointError, match=f"code that is not this version of diffquant's.*{problem}"):
        plan_server(model, **FOLDER)


def test_links_lead_into_the_folder_or_are_refused(vllm, ours, tmp_path):  # noqa: F811
    model = shutil.copytree(ours, tmp_path / "model")
    (model / MODELLING_FILE).rename(tmp_path / MODELLING_FILE)
    (model / MODELLING_FILE).symlink_to(tmp_path / MODELLING_FILE)
    with pytest.raises(CheckpointError, match=r"links to files outside it|a link out of the folder"):
        plan_server(model, **FOLDER)
    (model / MODELLING_FILE).unlink()
    shutil.move(tmp_path / MODELLING_FILE, model / MODELLING_FILE)
    (model / "notes.md").symlink_to("README.md")
    plan_server(model, **FOLDER)
    (model / "inner").mkdir()
    (model / "link").symlink_to("inner")
    with pytest.raises(CheckpointError, match="link, which is not a regular file"):
        plan_server(model, **FOLDER)
    (model / "link").unlink()
    os.mkfifo(model / "pipe.json")
    with pytest.raises(CheckpointError, match=r"named pipe, not a plain file.*pipe\.json"):
        plan_server(model, **FOLDER)


def test_a_download_caches_links_to_its_own_blobs_are_followed_and_checked(vllm, ours, tmp_path):  # noqa: F811
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(ours.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert plan_server(snapshot, **FOLDER).command[-1] == "--trust-remote-code"
    with (snapshot / MODELLING_FILE).open("a") as stream:
        stream.write("\n")
    with pytest.raises(CheckpointError, match=MODELLING_FILE):
        plan_server(snapshot, **FOLDER)


@in_one_test("model_type", ["somebodys", "llama", 'x"; import os; "', "dragon"])
def test_a_model_that_the_modelling_file_does_not_run_is_refused(vllm, ours, tmp_path, model_type):  # noqa: F811
    model = shutil.copytree(ours, tmp_path / "model")
    edit_json(model / "config.json", model_type=model_type)
    (model / MODELLING_FILE).write_text(make_modelling_text(MODELLING_FILE, model_type))
    with pytest.raises(diffquant.errors.DiffQuantError):
        plan_server(model, **FOLDER)


@in_one_test("file", MODELLING_FILES)
def test_a_model_type_is_text_of_the_modelling_file_whatever_it_holds(file):
    scope = {}
    text = make_modelling_text(file, '"; 1 / 0; "\n')
    line = next(line for line in text.splitlines() if line.startswith("MODEL_TYPE"))
    exec(line, scope)
    assert scope["MODEL_TYPE"] == '"; 1 / 0; "\n'


@in_one_test("key", ["configuration_files", "speculators_config"])
def test_a_config_that_leads_vllm_elsewhere_is_refused_by_the_plugin_too(vllm, ours, tmp_path, key):  # noqa: F811
    model = shutil.copytree(ours, tmp_path / "model")
    edit_json(model / "config.json", **{key: {"verifier": {"name_or_path": "/other"}}})
    with pytest.raises(CheckpointError, match=f"{key} in .* leads vLLM to another"):
        plan_server(model, **ASKED)


def test_other_formats_beside_the_model_are_not_chosen(vllm, ours):  # noqa: F811
    command = " ".join(plan_server(ours, **FOLDER).command)
    assert "--config-format hf --tokenizer-mode hf --load-format safetensors" in command


def test_processes_import_nothing_from_the_folder_that_they_are_started_in(vllm, tmp_path, monkeypatch):  # noqa: F811
    (tmp_path / "vllm").mkdir()
    for name in ("vllm/__init__.py", "pickle.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    plan = plan_server(POCKET, **ASKED)
    subprocess.run([*plan.command, "--help"], env=os.environ | plan.environment, capture_output=True, timeout=300)
    assert not (tmp_path / "ran").exists()
    WorkerProcess(b"", None, 1).stop()
    assert not (tmp_path / "ran").exists()


def poison(source, tokenizer=True):
    """Name a stranger's code in every file of a source that transformers takes such names from."""
    edit_json(
        source / "config.json",
        auto_map={"AutoConfig": "evil--code.Evil", "AutoModelForCausalLM": "evil--code.Evil"},
        custom_pipelines={"x": {"impl": "code.Evil"}},
        _attn_implementation="evil/kernel",
        configuration_files=["config.1.0.json"],
    )
    (source / "config.1.0.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil--code.Evil"}}))
    nested = {"image_processor": {"auto_map": {"AutoImageProcessor": "evil--code.Evil"}}, "kept": [1, "é"]}
    (source / "processor_config.json").write_text(json.dumps(nested))
    (source / "generation_config.json").write_text(json.dumps({"custom_generate": "evil/code", "top_k": 5}))
    (source / "code.py").write_text("raise SystemExit")
    changes = {"auto_map": {"AutoTokenizer": [None, "evil--code.EvilTokenizer"]}, "tokenizer_class": "Evil"}
    if tokenizer:
        edit_json(source / "tokenizer_config.json", **changes)
    else:
        (source / "tokenizer_config.json").write_text(json.dumps(changes))


def names_in(folder):
    text = "".join(file.read_text() for file in sorted(folder.rglob("*.json")))
    return [word for word in ("evil", "Evil", "custom_", "configuration_files") if word in text]


@pytest.fixture
def poisoned(tmp_path):
    source = write_checkpoint(tmp_path / "source", "unilm-v2")
    tiny_lm.tokenizer().save_pretrained(source)
    poison(source)
    return source


def test_what_names_a_strangers_code_is_not_carried_into_a_folder_to_trust(poisoned, tmp_path):
    assert type(load_tokenizer(poisoned)).__module__.startswith("transformers.")
    (poisoned / MODELLING_FILE).write_text("raise SystemExit('not this one')")
    report = diffquant.quantize(poisoned, tmp_path / "out", {"weights": "8:row"})
    assert names_in(tmp_path / "out") == []
    assert [file.name for file in (tmp_path / "out").rglob("*.py")] == [MODELLING_FILE]
    assert (tmp_path / "out" / MODELLING_FILE).read_text() == make_modelling_text(MODELLING_FILE, "diff_v2")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["auto_map"] == make_auto_map(MODELLING_FILE)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"top_k": 5}
    processor = json.loads((tmp_path / "out/processor_config.json").read_text())
    assert processor == {"image_processor": {}, "kept": [1, "é"]}
    for what in ("auto_map of config.json", "tokenizer_class of tokenizer_config.json", "code.py"):
        assert what in str(report)
    assert "`auto_map of tokenizer_config.json`" in (tmp_path / "out/README.md").read_text()
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "code.py").write_text(EVIL.format(mark=str(tmp_path / "ran")))
    kinds = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
    assert trusted([(kind, tmp_path / "out") for kind in kinds], tmp_path) == ""
    assert not (tmp_path / "ran").exists()
    trusted([("AutoConfig", poisoned)], tmp_path)
    assert (tmp_path / "ran").exists()


def test_exports_and_conversions_name_no_code_either(poisoned, tmp_path):
    for options in ({}, {"portable": True}):
        folder = tmp_path / f"onnx-{len(options)}"
        report = diffquant.export(poisoned, folder, **options)
        assert names_in(folder) == []
        assert not list(folder.rglob("*.py"))
        assert "auto_map of tokenizer_config.json" in str(report)
    llama = tiny_lm.write_llama(tmp_path / "llama")
    poison(llama)
    report = diffquant.convert(llama, tmp_path / "converted", "diff-v2")
    assert names_in(tmp_path / "converted") == []
    assert [file.name for file in (tmp_path / "converted").glob("*.py")] == [MODELLING_FILE]
    assert "code.py" in str(report)
    assert "`code.py`" in (tmp_path / "converted/README.md").read_text()


def test_a_folder_of_our_own_is_quantized_again_without_a_word_about_code(tmp_path):
    diffquant.convert(tiny_lm.write_llama(tmp_path / "llama"), tmp_path / "ours", "diff-v2")
    report = diffquant.quantize(tmp_path / "ours", tmp_path / "low", {"weights": "8:row"})
    assert report.notes == ()
    assert "own code" not in (tmp_path / "low/README.md").read_text()


def test_a_tokenizer_that_needs_the_code_is_said_not_to_open(tmp_path):
    source = write_checkpoint(tmp_path / "source", "unilm-v2")
    poison(source, tokenizer=False)
    report = diffquant.quantize(source, tmp_path / "out", {"weights": "8:row"})
    assert "the tokenizer cannot be opened without what was left out" in str(report)


def test_a_folder_without_a_modelling_file_names_no_code_either(tmp_path):
    source = write_checkpoint(tmp_path / "source", "llama")
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    report = diffquant.quantize(source, tmp_path / "out", {"weights": "8:row"})
    assert "auto_map" not in json.loads((tmp_path / "out/config.json").read_text())
    assert "auto_map of config.json" in str(report)


@in_one_test(
    "name",
    ["LlamaTokenizerFast", "LlamaTokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer"],
)
def test_tokenizers_of_transformers_stay(tmp_path, name):
    text = json.dumps({"tokenizer_class": name, "auto_map": 7}, indent=3)
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "vocab.json").write_text(json.dumps({"auto_map": 1, "custom_generate": 2}))
    assert remove_code_entries(tmp_path, {"architectures": ["X"]}) == ({"architectures": ["X"]}, [])
    assert (tmp_path / "tokenizer_config.json").read_text() == text


def test_a_name_given_twice_and_a_file_that_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "a.json").write_text('{"auto_map": "a--b.C", "auto_map": 1, "kept": 2}')
    (tmp_path / "b.json").write_text("\ufeff{}")
    (tmp_path / "c.json").write_text("[" * 100_000)
    left_out = remove_code_entries(tmp_path, {})[1]
    assert left_out == ["auto_map of a.json", "b.json, which cannot be read", "c.json, which cannot be read"]
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text())["kept"] == 2
    assert "a--b.C" not in (tmp_path / "a.json").read_text()


def test_a_tokenizer_that_was_loaded_saves_no_name_of_code(tmp_path):
    source = tiny_lm.write_llama(tmp_path / "model")
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil--code.Evil"]})
    load_tokenizer(source).save_pretrained(tmp_path / "saved")
    assert names_in(tmp_path / "saved") == []
    AutoTokenizer.from_pretrained(tmp_path / "saved")
    AutoConfig.from_pretrained(source)
