"""Tests of `tests/gpu` as Triton compiles their kernels, run on the PTX machine (`tests.support.gpu_on_ptx`).

A few run in every run of the tests. `make test-all ONLY=ptx` runs all that the plugin selects with one of two Tritons
for one of two cards, another each day; DIFFQUANT_PTX_WHOLE, a number from 0 to 3, says which.
"""

import os
import time

import pytest

from tests.kernels.ptx_runs import COMBINATIONS, named, run
from tests.support.thorough import thorough

WHOLE = "DIFFQUANT_PTX_WHOLE"
# Each kind of kernel that is quick to run: warp-specialized, with rows that see no key; decode and append; decode from
# pages; decode from latents; GEMV.
SAMPLE = [
    "test_specialized.py::test_close_to_the_plain_form[v1-16-bit-64-torch.bfloat16-ragged, one empty]",
    "test_decode.py::test_what_a_query_sees[v1-one key]",
    "test_paged.py::test_chunks_see_a_window_and_both_maps_keys_in_one_head[70]",
    "test_latent.py::test_chunks_of_ragged_sequences_see_a_window[1-33]",
    "test_linear.py::test_kernels_equal_float64[torch.float16-4-33-576-32-16]",
]


def ran(capability, triton, tests):
    """What pytest says of tests on the machine."""
    done = run(capability, triton, tests)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@thorough
def test_a_kernel_of_each_kind_passes_its_test_as_it_is_compiled():
    pytest.importorskip("triton")
    said = ran(90, None, SAMPLE)
    assert said.startswith("." * len(SAMPLE) + " ")
    kernels = [
        "attend_specialized",
        "decode_key_split",
        "append_tokens",
        "paged_key_split",
        "latent_key_split",
        "_gemv",
    ]
    assert [kernel for kernel in kernels if f"\n{kernel}: " not in said] == []


@pytest.mark.skipif(WHOLE not in os.environ, reason="takes many minutes: make test-all ONLY=ptx runs it")
# Of all of them, each is shorter than what hangs.
@pytest.mark.timeout(7200)
def test_every_kernel_passes_its_tests_as_it_is_compiled():
    chosen = os.environ[WHOLE]
    number = int(time.time() // 86400) % len(COMBINATIONS) if chosen == "today" else int(chosen)
    triton, capability = COMBINATIONS[number]
    print(f"{WHOLE}={number}: {named(triton, capability)}")
    said = ran(capability, triton, [""])
    print(said)
    kernels = [
        "prefill_v1",
        "prefill_v2",
        "attend_int8",
        "attend_rounded",
        "decode_key_split",
        "append_tokens",
        "_gemv",
    ]
    kernels += ["paged_key_split", "latent_key_split"]
    kernels += ["attend_specialized", "attend_fp8_specialized"] if capability == 90 else []
    assert [kernel for kernel in kernels if f"\n{kernel}: " not in said] == []
