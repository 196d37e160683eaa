"""What the shipped prefill configurations use of a GPU, read from their machine code."""

from functools import partial

import torch

from diffquant.family.norm import PairNorm
from tests.support.kernel_inputs import on_call, random_call
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.thorough import thorough

CASES = [(g, capability, width) for g in ("v1", "v2") for capability in (80, 90) for width in (64, 128)]
NAMES = [f"{g}-sm_{capability}-d{width}" for g, capability, width in CASES]


def launches():
    from diffquant.kernels.attention.prefill import prefill

    for name, (generation, capability, width) in zip(NAMES, CASES, strict=True):
        q, k, v, lam = random_call(generation, 256, 256, width=width, dtype=torch.bfloat16)
        post = PairNorm(1e-5, torch.ones(v.shape[-1]), 0.8)
        yield name, capability, partial(on_call(prefill), q, k, v, lam, scale=0.125, post=post)


def faults(binary):
    if binary.shared > SHARED_LIMIT[binary.capability]:
        yield f"{binary.shared} bytes of shared memory"
    if binary.spills_in_a_main_loop():
        yield "a main loop spills"
    if binary.overwritten:
        yield f"operands are overwritten: {binary.overwritten}"
    # In fp16 the noise map keeps what the difference needs, whatever the output's type.
    if binary.pointers.get("Parked", "*fp16") != "*fp16":
        yield f"a map waits in {binary.pointers['Parked']}"
    if binary.waits_for_each_product():
        yield "a main loop waits for each product"
    inner, edge = sorted(binary.main_loops, key=lambda loop: sum(loop.values()))
    products, loads = ("HGMMA", "UTMALDG") if binary.capability == 90 else ("HMMA", "LDGSTS")
    for opcode in (products, loads):
        if not (inner.get(opcode) and edge.get(opcode)):
            yield f"a main loop without {opcode}"
    if "FSEL" in inner or "FSEL" not in edge:
        yield "keys that every query sees are masked"
    # Weights go from one product to the next in registers.
    if "STS" in inner:
        yield "the inner loop stores to shared memory"


# One test, so that tests run side by side do not each compile everything.
@thorough
def test_shipped_configurations_fit_and_keep_the_tensor_cores_fed():
    binaries = compiled(__file__)
    assert {name: len(each) for name, each in binaries.items()} == dict.fromkeys(NAMES, 1)
    assert [f"{name}: {fault}" for name, (binary,) in binaries.items() for fault in faults(binary)] == []
