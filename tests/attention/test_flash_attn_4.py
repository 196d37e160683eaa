"""The backend of the flash-attn-4 package, with a stand-in of its signature, since it needs CUDA."""

import ast
import inspect
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diffquant.attention import BACKENDS, attend
from diffquant.attention.backends import composed, flash_attn_4
from diffquant.attention.naive import naive
from diffquant.attention.registry import find_auto_backends
from diffquant.benchmarks.peers import PEERS
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from tests.support.kernel_inputs import CAUSAL, random_call
from tests.support.tables import in_one_test

# Parameters of `flash_attn.cute.flash_attn_func` and their defaults, in version 4.0.0b36.
RECORDED = (
    "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
)


class StandIn:
    """The package's function by torch's SDPA in float64, and the shapes of the values that it was called with."""

    def __init__(self):
        self.values = []

    def flash_attn_func(self, q, k, v, softmax_scale, causal, window_size=(None, None)):
        assert causal
        self.values.append(tuple(v.shape))
        dtype = v.dtype
        q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
        left, right = window_size
        assert right is None
        # Queries are the last of the keys' positions.
        ahead = torch.arange(k.shape[2]) - (torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2])
        seen = (ahead <= 0) & (ahead >= (-k.shape[2] if left is None else -left))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2).to(dtype), None


@pytest.fixture
def stand_in(monkeypatch):
    function = StandIn()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=function.flash_attn_func))
    return function


def test_the_stand_in_takes_what_the_packages_signature_has():
    known = {each.partition("=")[0] for each in RECORDED.split(", ")}
    assert set(inspect.signature(StandIn().flash_attn_func).parameters) <= known
    if not flash_attn_4._is_installed():
        return
    for place in find_spec("flash_attn.cute").submodule_search_locations:
        tree = ast.parse(Path(place, "interface.py").read_text(encoding="utf-8"))
        function = next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "flash_attn_func")
        for parameter in function.args.args:
            parameter.annotation = None
        assert ast.unparse(function.args) == RECORDED


@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
@pytest.mark.parametrize(("queries", "window"), [(29, None), (1, None), (11, None), (29, 7), (11, 1), (29, 29)])
def test_the_package_is_asked_for_the_equation(stand_in, generation, queries, window):
    post = PairNorm(1e-5, factor=0.8)
    make = partial(random_call, generation, queries, 29, width=16, pairs=4, kv_pairs=2, batch=2, dtype=torch.float64)
    call = AttentionCall(*make(), scale=0.3, mask=Mask(window=window), post=post)
    torch.testing.assert_close(flash_attn_4.flash_attn_4(call), naive(call), rtol=1e-9, atol=1e-9)
    # V1 in two calls with whole values, V2 in one.
    width = {"plain": 16, "v1": 32, "v2": 16}[generation]
    assert stand_in.values == [(2, 29, 2, width)] * (2 if generation == "v1" else 1)


def refusal(dtype=torch.float16, is_cuda=True, mask=CAUSAL, widths=(64, 128), queries=3, gradient=False):
    v = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 1, 3, widths[1]), device="cuda")
    q = [torch.empty(1, 1, queries, widths[0])]
    call = SimpleNamespace(q=q, v=v, mask=mask, key_count=3, query_count=queries, needs_gradient=gradient)
    return BACKENDS["flash_attn_4"].refuses(call)


@in_one_test(
    ("capability", "options", "message"),
    [
        ((9, 0), {}, None),
        ((9, 0), {"dtype": torch.bfloat16, "widths": (128, 256), "mask": Mask(window=2)}, None),
        ((9, 0), {"widths": (8, 16)}, None),
        ((10, 0), {"widths": (128, 128)}, None),
        ((9, 0), {"is_cuda": False}, "runs on CUDA only"),
        ((9, 0), {"dtype": torch.float32}, "in float16 and bfloat16, not float32"),
        ((9, 0), {"mask": Mask(keys=torch.ones(1, 3, dtype=torch.bool))}, "without padding"),
        ((9, 0), {"mask": Mask(explicit=torch.ones(1, 1, 3, 3, dtype=torch.bool))}, "without padding"),
        ((9, 0), {"queries": 4}, "without padding"),
        ((9, 0), {"gradient": True}, "without gradients"),
        ((8, 6), {}, r"on Hopper and Blackwell \(sm_90, sm_100, sm_110\), not on sm_86"),
        ((9, 0), {"widths": (192, 384)}, "at most 256 on sm_90; here keys have 192 and values 384"),
        ((9, 0), {"widths": (4, 8)}, "a multiple of 8 channels, at most 256 on sm_90; here keys have 4 and"),
        ((10, 0), {"widths": (128, 256)}, "at most 128 on sm_100; here keys have 128 and values 256"),
    ],
)
def test_what_the_package_cannot_do_is_refused(monkeypatch, capability, options, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(flash_attn_4, "_is_installed", lambda: True)
    found = refusal(**options)
    if message is not None:
        assert re.search(message, found)
        return
    assert found is None
    monkeypatch.setattr(flash_attn_4, "_is_installed", lambda: False)
    assert refusal(**options) == "the flash-attn-4 package is not installed: pip install flash-attn-4"


def test_it_is_never_chosen_automatically_and_the_bench_says_why_it_is_left_out():
    assert "flash_attn_4" not in [backend.name for rounds in (False, True) for backend in find_auto_backends(rounds)]
    call = AttentionCall(*random_call("v1", 5, 5), scale=0.3, mask=Mask())
    with pytest.raises(UsageError, match="'flash_attn_4': flash-attn-4 runs on CUDA only; use auto"):
        attend(call, "flash_attn_4")
    for name in ("Transformer, flash-attn-4", "FlashDiffAttn_1, flash-attn-4"):
        assert PEERS[name].missing(call) == "flash-attn-4 runs on CUDA only"


def test_flash_attn_4_alone_is_not_taken_for_flash_attn(monkeypatch, tmp_path):
    """Its wheel has `flash_attn/cute` and no `flash_attn/__init__.py`."""
    if find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed")
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/__init__.py").touch()
    assert not flash_attn_4._is_installed.__wrapped__()
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attn_4._is_installed.__wrapped__()
    assert not composed._has_flash_attn.__wrapped__()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    (tmp_path / "flash_attn/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert composed._has_flash_attn.__wrapped__()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
