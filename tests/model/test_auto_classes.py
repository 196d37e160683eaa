"""transformers' auto classes open whatever folder diffquant writes, in a process that has only imported diffquant."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from diffquant import Recipe, load, quantize
from diffquant.errors import UsageError
from diffquant.model.adapters import READERS, adapter_for
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

IDS = [[5, 17, 3, 42, 8, 1, 60]]
PROGRAM = """
import json, sys
{imports}
import torch
assert "diffquant.quantization.loading" not in sys.modules
logits = {{}}
for name, folder in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits[name] = model(torch.tensor({ids})).logits.tolist()
print(json.dumps(logits))
"""
ORDERS = {
    "transformers first": "from transformers import AutoModelForCausalLM; import diffquant",
    "diffquant first": "import diffquant; from transformers import AutoModelForCausalLM",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind that `quantize`, `convert` and `save_pretrained` write."""
    root = tmp_path_factory.mktemp("kinds")
    sources = ["unilm-v1", "unilm-v1-plain", "unilm-v2", "motif", "motif-grouped", "phi4flash", "motif3", "gated"]
    sources.append("diffllama")
    kinds = {name: write_checkpoint(root / name, name) for name in sources}
    for name in sources[:-1]:
        quantize(kinds[name], root / f"{name}-low", Recipe.of(weights="8:row", kv="8"))
        kinds[f"{name}-low"] = root / f"{name}-low"
    for name in ("unilm-v1", "phi4flash"):
        load(kinds[name]).save_pretrained(root / f"{name}-saved")
        kinds[f"{name}-saved"] = root / f"{name}-saved"
    kinds["diff-v2"] = tiny_lm.write_diff_v2(root / "diff-v2")
    return kinds


@pytest.mark.parametrize("order", sampled(ORDERS, 2))
def test_a_fresh_process_that_imported_diffquant_opens_every_kind_of_folder(folders, order):
    program = PROGRAM.format(imports=ORDERS[order], ids=IDS)
    paths = json.dumps({name: str(folder) for name, folder in folders.items()})
    done = subprocess.run([sys.executable, "-c", program, paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    opened = json.loads(done.stdout.splitlines()[-1])
    assert opened.keys() == folders.keys()
    ids = torch.tensor(IDS)
    for name, folder in folders.items():
        expected = load(folder, dtype=torch.float64)(ids).logits
        torch.testing.assert_close(torch.tensor(opened[name], dtype=torch.float64), expected, rtol=0, atol=1e-5)
    # Made of a stock Llama, which computes the same.
    stock = LlamaForCausalLM.from_pretrained(folders["diff-v2"].with_name("diff-v2-source"))(ids).logits
    torch.testing.assert_close(torch.tensor(opened["diff-v2"]).float(), stock, rtol=0, atol=1e-3)


def test_registering_our_types_imports_no_model_of_transformers():
    code = "import sys, diffquant, transformers.models.auto.modeling_auto; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Its import may be what has our types registered, and is not finished then.
    assert not {name for name in done.stdout.split() if name.startswith("transformers.models.llama.modeling")}


def test_every_source_format_is_registered():
    unknown = [kind for kind in READERS if AutoConfig.for_model(kind).model_type != kind]
    assert not unknown


DEVICE = torch.device("cpu")


@in_one_test("device_map", ["cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}, DEVICE, {"": DEVICE}])
def test_a_device_map_is_one_device_or_several(folders, device_map):
    model = AutoModelForCausalLM.from_pretrained(folders["unilm-v2"], device_map=device_map)
    ids = torch.tensor(IDS)
    assert torch.equal(model(ids).logits, load(folders["unilm-v2"])(ids).logits)


def test_what_is_not_at_low_bits_can_be_trained(folders):
    assert all(p.requires_grad for p in AutoModelForCausalLM.from_pretrained(folders["unilm-v2"]).parameters())
    low = AutoModelForCausalLM.from_pretrained(folders["unilm-v2-low"])
    assert not any(p.requires_grad for p in low.parameters())


@in_one_test("kind", ["unilm-v2", "motif", "phi4flash", "motif3"])
def test_a_config_alone_makes_an_untrained_model(folders, kind):
    config = AutoConfig.from_pretrained(folders[kind])
    wanted = adapter_for(json.loads((folders[kind] / "config.json").read_text())).architecture
    shapes = {name: each.shape for name, each in wanted.parameters.items()}
    for options, dtype in (({}, torch.float32), ({"dtype": torch.bfloat16}, torch.bfloat16)):
        model = AutoModelForCausalLM.from_config(config, **options)
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
        assert model.dtype == dtype


@in_one_test("kind", ["unilm-v2", "motif-low", "phi4flash", "motif3", "gated-low"])
def test_a_config_may_be_given_and_change_calls_alone(folders, kind):
    path, ids = folders[kind], torch.tensor(IDS)
    config = AutoConfig.from_pretrained(path)
    expected = load(path)(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path, config=config)(ids).logits, expected)
    assert AutoModelForCausalLM.from_pretrained(path, config=config, dtype="bfloat16").dtype == torch.bfloat16
    logits, states = AutoModelForCausalLM.from_pretrained(path, output_hidden_states=True, return_dict=False)(ids)
    assert torch.equal(logits, expected)
    assert len(states) == config.num_hidden_layers + 1
    assert not AutoModelForCausalLM.from_pretrained(path, use_cache=False).config.use_cache
    for name, value in (("num_hidden_layers", 1), ("rope_theta", 5.0)):
        with pytest.raises(UsageError, match=f"leave out {name}$"):
            AutoModelForCausalLM.from_pretrained(path, **{name: value})
    config.hidden_size = 32
    with pytest.raises(UsageError, match=r"leave out hidden_size$"):
        AutoModelForCausalLM.from_pretrained(path, config=config)


@in_one_test(
    ("options", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "leave out quantization_config"),
        ({"device_map": "balanced"}, "device_map must be 'auto' or a mapping"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
    ],
)
def test_what_load_does_not_do_is_refused_by_name(folders, options, message):
    with pytest.raises(UsageError, match=message):
        AutoModelForCausalLM.from_pretrained(folders["unilm-v2"], **options)
