"""Which devices and which Triton the kernels take, and what they say where they do not."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from diffquant.kernels import gpu
from diffquant.kernels.cache.decode_split import TILES, DecodeSplit, choose_split_count
from diffquant.kernels.gpu import device_refusal, fp8_pv_refusal, survey_kernels, triton_version, warpgroup_refusal
from diffquant.kernels.linear import gemm
from diffquant.kernels.linear import linear as module
from diffquant.kernels.linear.linear import launch_matmul, linear
from tests.support.absent_gpu import H100, simulate_gpu
from tests.support.packed_weights import random_activations, random_case, relative_error

CUDA = torch.device("cuda", 0)
HALF = replace(H100, processors=66)
KIB_99 = 101_376


@pytest.fixture
def machine(monkeypatch):
    """Makes torch see a CUDA device, and a version of Triton that may not be there."""

    def make(capability, triton="3.9.0", shared_memory=232_448):
        properties = SimpleNamespace(shared_memory_per_block_optin=shared_memory, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setitem(sys.modules, "triton", None if triton is None else SimpleNamespace(__version__=triton))
        monkeypatch.setattr(gpu, "find_spec", lambda _: triton)
        for cached in (triton_version, gpu.gpu_of):
            cached.cache_clear()

    yield make
    for cached in (triton_version, gpu.gpu_of):
        cached.cache_clear()


@pytest.mark.parametrize("version", ["3.3.1", "3.4.0", "3.5.1+git12"])
def test_an_old_triton_is_refused_by_its_version(machine, version):
    machine((9, 0), version)
    reason = device_refusal(CUDA)
    assert reason is not None
    assert "need Triton 3.6 or newer" in reason
    assert f"installed is {version[:3]}" in reason


@pytest.mark.parametrize(("capability", "version"), [((8, 0), "3.6.0"), ((9, 0), "3.7.1+cu130"), ((12, 0), "3.10.0")])
def test_newer_ones_are_not(machine, capability, version):
    machine(capability, version)
    assert device_refusal(CUDA) is None


def test_other_devices_are_refused(machine, monkeypatch):
    assert device_refusal(torch.device("cpu")) == "Triton kernels run on CUDA devices, not on cpu"
    machine((7, 5))
    assert "compute capability 8.0 (Ampere) or newer" in device_refusal(CUDA)
    machine((9, 0), None)
    assert device_refusal(CUDA) == "Triton is not installed"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "this torch is built for AMD's" in device_refusal(CUDA)


@pytest.mark.parametrize(
    ("capability", "version", "refused"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.7.0", False), ((8, 0), "3.6.0", False), ((10, 0), "3.6.0", False)],
)
def test_weights_are_unpacked_in_registers_where_triton_compiles_that_rightly(machine, capability, version, refused):
    machine(capability, version)
    assert (warpgroup_refusal(CUDA) is not None) == refused


@pytest.fixture
def old_triton_on_hopper(monkeypatch, has_capability):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    has_capability(9, 0)
    monkeypatch.setattr(gpu, "triton_version", lambda: (3, 6))


def test_where_it_does_not_single_warps_multiply_and_more_than_256_tokens_take_an_expanded_weight(
    old_triton_on_hopper, monkeypatch
):
    packed, exact = random_case(48, 96, 4, 32)
    warps, x = [], random_activations(100, 96)
    monkeypatch.setattr(gemm, "choose_config", lambda table, key: warps.append(table[key]["warps"]) or table[key])
    assert relative_error(launch_matmul(x, packed, None), x.double() @ exact.T) < 1e-3
    # Triton's products of a warpgroup take four warps.
    assert warps == [2]
    x = random_activations(257, 96)
    expanded = []
    monkeypatch.setattr(module, "device_refusal", lambda _: None)
    monkeypatch.setattr(module, "_write_out", lambda weight, dtype: expanded.append(weight) or exact.to(dtype))
    monkeypatch.setattr(gemm, "launch_gemm", lambda *_: pytest.fail("the kernel was launched"))
    assert relative_error(linear(x, packed), x.double() @ exact.T) < 1e-3
    assert expanded == [packed]


@pytest.mark.parametrize("start", [0.1, 0.5, 2])
@pytest.mark.parametrize(("others", "steps", "room"), [(96, 128, 264), (32, 128, 264), (7, 512, 216)])
def test_shares_of_a_long_context_fill_their_waves(others, steps, room, start):
    shares = choose_split_count(others, steps, room, start)
    waves = -(-others * shares // room)
    # Of all that the device has room for while they run, the share that works.
    assert others * steps / (waves * room * -(-steps // shares)) >= 0.85


def test_keys_are_split_while_there_is_room_and_no_further():
    assert choose_split_count(1, 1, 264, 2) == 1
    assert choose_split_count(1, 128, 264, 2) == 128
    assert choose_split_count(264, 128, 264, 2) == 1


def test_a_start_that_costs_more_leads_to_fewer_waves():
    # 100 programs a share on 264 places: the cheaper a start, the more waves may fill them.
    waves = [-(-100 * choose_split_count(100, 128, 264, start) // 264) for start in (0.01, 1, 30)]
    assert waves == sorted(waves, reverse=True)
    assert waves[0] > waves[-1] == 1


def test_shares_are_those_of_a_devices_own_bandwidth_and_multiprocessors():
    q = [torch.zeros(8, 12, 1, 128, dtype=torch.float16)]
    shares = {}
    for name, card in {"H100": H100, "slow": replace(H100, bytes_per_second=1e11), "half": HALF}.items():
        with simulate_gpu(card):
            shares[name] = DecodeSplit.of(TILES["decode/sm_90/256/4"], q, 12, 2048, 16384, None).shares
    # 96 programs a share, and places for two blocks on each of 132 or 66 multiprocessors.
    assert shares["slow"] >= shares["H100"] > 1
    assert shares["half"] != shares["H100"]


def test_a_devices_bandwidth_is_its_memorys_clock_times_its_width(machine, monkeypatch):
    machine((9, 0))
    # An H100 (SXM), as its driver says: 2,619 MHz and 5,120 bits.
    memory = {"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}
    for processors, told, wanted in ((132, memory, 3.35e12), (66, {}, 3.35e12 / 2)):
        properties = SimpleNamespace(shared_memory_per_block_optin=KIB_99, multi_processor_count=processors, **told)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        gpu.gpu_of.cache_clear()
        assert gpu.bandwidth(CUDA) == pytest.approx(wanted * gpu.COPY_REACHES, rel=0.01)


def test_the_survey_says_what_runs_and_why_the_rest_does_not(machine, monkeypatch):
    machine((9, 0), "3.6.0")
    hopper = survey_kernels(CUDA)
    assert (hopper.capability, hopper.shared_memory, hopper.triton, hopper.table) == ("9.0", 232_448, "3.6", "sm_90")
    (kernel,) = hopper.refused
    assert kernel.startswith("packed linear layers of more than 256 tokens")
    assert "#9433" in str(hopper)
    machine((10, 0))
    assert "Ampere's configurations (sm_80), since none was tuned for this device" in str(survey_kernels(CUDA))
    machine((12, 0), "3.9.0", KIB_99)
    monkeypatch.setenv("DIFFQUANT_KERNEL_CONFIGS", "mine.json")
    assert survey_kernels(CUDA).refused == {}
    assert "Ampere's configurations (sm_80), since none was tuned for this device, tuned by mine.json" in str(
        survey_kernels(CUDA)
    )
    machine((8, 0), "3.4.0")
    assert list(survey_kernels(CUDA).refused) == ["any of them"]
    machine((8, 6))
    assert survey_kernels(CUDA).refused == {"attention triton-fp8": fp8_pv_refusal(CUDA)}
