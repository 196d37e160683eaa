"""What "auto" computes a prompt by on an H100, where both ways were measured."""

import json
import lzma
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from diffquant.attention.backends import composed
from diffquant.attention.registry import BACKENDS, backend_for
from diffquant.family.mask import Mask
from tests.support.kernel_inputs import random_call

RAW = Path(__file__).parents[2] / "bench/results/h100/ratios.json.xz"
GROUPS = {
    (False, 128, 16384): "prefill V1, 16384 tokens, bfloat16",
    (False, 128, 8192): "prefill V1, 8192 tokens, float16",
    (False, 128, 4096): "prefill V1, 4096 tokens, bfloat16",
    (False, 64, 8192): "prefill V1, d 64, 8K tokens, bfloat16",
    (True, 128, 8192): "prefill V2, 8K tokens, bfloat16",
}


def test_the_table_is_what_an_h100_measured():
    groups = {group["group"]: group["runs"] for group in json.loads(lzma.decompress(RAW.read_bytes()))["groups"]}

    def milliseconds(runs, path):
        return median(cell["median"] for run in runs for cell in run if cell["path"] == path)

    measured = {}
    for key, name in GROUPS.items():
        # One call for both maps of V2, which no backend was named for, and one a map of V1.
        other = "FlashDiffAttn_1" if key[0] else "FlashDiffAttn_1, SDPA cuDNN"
        measured[key] = round(milliseconds(groups[name], other) / milliseconds(groups[name], "DIFF, fused"), 2)
    assert measured == composed.FUSED_AGAINST_CUDNN


def prompt_of(generation, width, length, mask=None):
    """A call as an H100 would be given it, without its tensors."""
    is_v2, on_gpu = generation == "v2", {"is_cuda": True, "device": torch.device("cuda", 0), "dtype": torch.float16}
    shape = torch.Size((1, 2, length, width * (1 if is_v2 else 2)))
    maps = [torch.empty(1, 2, length, width, device="meta", dtype=torch.float16)] * 2
    call = {"maps": 2, "signals_per_noise": 1, "has_quantized_maps": False, "shares_keys": is_v2, "q": maps, "k": maps}
    call |= {"v": SimpleNamespace(shape=shape, element_size=lambda: 2, **on_gpu)}
    call |= {"query_count": length, "key_count": length}
    return SimpleNamespace(**call, mask=mask or Mask(), qk=SimpleNamespace(quantizes=False))


@pytest.fixture
def h100(monkeypatch):
    """Gives torch an H100 with so many bytes free, and kernels that take every call."""

    def with_free(nbytes, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (nbytes, nbytes))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)

    monkeypatch.setattr(composed, "SDPAParams", lambda *_: None)
    monkeypatch.setattr(composed, "can_use_cudnn_attention", lambda _: True)
    for name in ("triton", "flash_attn"):
        refusal = None if name == "triton" else "not installed"
        monkeypatch.setitem(vars(BACKENDS[name]), "refuses", lambda _, refusal=refusal: refusal)
    with_free(80 << 30)
    return with_free


@pytest.mark.parametrize(
    ("generation", "width", "length", "chosen"),
    [
        ("v2", 128, 8192, "flashdiff1-cudnn"),
        ("v2", 128, 30000, "flashdiff1-cudnn"),
        ("v1", 64, 8192, "flashdiff1-cudnn"),
        ("v1", 128, 16384, "triton"),
        # Not measured.
        ("v2", 128, 4096, "triton"),
        ("v2", 64, 8192, "triton"),
    ],
)
def test_auto_takes_what_was_measured_to_be_faster(generation, width, length, chosen, h100):
    assert backend_for(prompt_of(generation, width, length)).name == chosen


def test_another_device_little_memory_and_padding_take_the_fused_kernel(h100):
    prompt = prompt_of("v2", 128, 8192)
    # Output of 4 MB, of which it takes four times as much.
    h100(40 << 20)
    assert backend_for(prompt).name == "flashdiff1-cudnn"
    h100(30 << 20)
    assert backend_for(prompt).name == "triton"
    h100(80 << 30, (10, 0))
    assert backend_for(prompt).name == "triton"
    h100(80 << 30)
    for mask in (Mask(torch.ones(1, 8192, dtype=torch.bool)), Mask(window=100)):
        assert backend_for(prompt_of("v2", 128, 8192, mask)).name == "triton"


def test_no_kernel_that_no_gpu_has_run_is_chosen_automatically():
    assert not [name for name in BACKENDS if "specialized" in name and BACKENDS[name].priority]


def test_elsewhere_it_is_refused_with_the_reason(caplog):
    from diffquant.family.call import AttentionCall

    call = AttentionCall(*random_call("v2", 40, 40), scale=0.1, mask=Mask())
    assert BACKENDS["flashdiff1-cudnn"].refuses(call) == "cuDNN runs on CUDA only"
    assert not BACKENDS["flashdiff1-cudnn"].is_worthwhile(call)
