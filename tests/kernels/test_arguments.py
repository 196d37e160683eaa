"""What attention kernels refuse, and which configuration a launch takes."""

import json

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.kernels import configs
from diffquant.kernels.arguments import empty_output, widths_refusal
from diffquant.kernels.configs import choose_config, make_attention_config, override_configs
from diffquant.kernels.gpu import device_class
from tests.support.tables import in_one_test

Q, V = torch.zeros(2, 6, 5, 64, dtype=torch.float16), torch.zeros(2, 3, 7, 128, dtype=torch.float16)


def test_what_no_kernel_takes_is_refused_with_a_reason():
    assert widths_refusal(Q, V) is None
    assert widths_refusal(Q.float(), V) == "q, k and v are float32; the kernel supports float16 and bfloat16"
    assert widths_refusal(Q[..., :32], V) == "q and k are 32 wide; the kernel supports head widths 64 and 128"
    assert widths_refusal(Q, V[..., :96]) == "v is 96 wide; with keys 64 wide the kernel supports 64 and 128"


def test_heads_of_an_output_flatten_without_a_copy():
    out = empty_output(Q, 128)
    assert out.shape == (2, 6, 5, 128)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


TABLE = {"prefill/sm_90/64": make_attention_config(128, 64, 8, 2)}


@in_one_test(("version", "name"), [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((12, 0), "sm_80")])
def test_only_hopper_takes_hopper_configurations(version, name, has_capability):
    has_capability(*version)
    assert device_class(torch.device("cuda")) == name


def test_a_device_without_kernels_has_no_class(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="run on CUDA devices, not on cpu"):
        device_class(torch.device("cpu"))


@pytest.fixture
def tuned_file(tmp_path, monkeypatch):
    """Writes a file of tuned entries that the next lookup reads."""

    def write(text):
        (tmp_path / "tuned.json").write_text(text)
        monkeypatch.setenv(configs.VARIABLE, str(tmp_path / "tuned.json"))
        configs._read_tuned.cache_clear()

    yield write
    configs._read_tuned.cache_clear()


def test_a_tuned_entry_replaces_fields_of_the_shipped_one(tuned_file):
    assert choose_config(TABLE, "prefill/sm_90/64") == make_attention_config(128, 64, 8, 2)
    tuned_file(json.dumps({"prefill/sm_90/64": {"stages": 3}}))
    assert choose_config(TABLE, "prefill/sm_90/64") == make_attention_config(128, 64, 8, 3)
    with override_configs({"prefill/sm_90/64": {"keys": 128, "stages": 1}}):
        assert choose_config(TABLE, "prefill/sm_90/64") == make_attention_config(128, 128, 8, 1)
    assert choose_config(TABLE, "prefill/sm_90/64") == make_attention_config(128, 64, 8, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read .*tuned.json"),
        ('{"prefill/sm_90/64": {"stages": "3"}}', "tuned.json is not"),
        ('{"prefill/sm_90/64": {"stage": 3}}', "unknown stage; choose from keys, queries, stages, warps"),
    ],
)
def test_a_tuned_file_that_makes_no_sense_is_refused(text, message, tuned_file):
    tuned_file(text)
    with pytest.raises(UsageError, match=message):
        choose_config(TABLE, "prefill/sm_90/64")
