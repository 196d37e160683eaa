"""The machine that runs Gluon kernels: barriers, copies and products behave as on Hopper, and faults are seen."""

import pytest
import torch

from tests.support import gluon_machine
from tests.support.gluon_machine import Barrier, Descriptor, Pointer, Shared

FULL = torch.arange(40.0).reshape(4, 10)[:, :8].half()


@pytest.fixture
def barrier():
    import threading

    made = Barrier(threading.Condition())
    made.count = made.pending = 2
    return made


def test_a_phase_ends_after_all_arrivals_and_all_bytes(barrier, monkeypatch):
    monkeypatch.setattr(gluon_machine, "_PATIENCE", 0.01)
    barrier.wait(1)  # the phase before the first has ended
    barrier.arrive(announced=6)
    barrier.arrive()
    with pytest.raises(TimeoutError, match="2 arrivals stays in phase 0"):
        barrier.wait(0)
    barrier.bring(6)
    barrier.wait(0)
    with pytest.raises(TimeoutError):
        barrier.wait(1)


def test_a_copy_holds_zeros_outside_of_the_matrix():
    source = Descriptor(Pointer(FULL), [3, 8], [8, 1], [2, 8])
    assert source.tile([2, 0]).tolist() == [FULL[2].tolist(), [0.0] * 8]
    assert source.tile([0, 4])[:, 4:].count_nonzero() == 0
    with pytest.raises(ValueError, match="no descriptor takes strides"):
        Descriptor(Pointer(FULL), [3, 8], [9, 1], [2, 8])


def test_a_product_sees_what_shared_memory_holds_when_it_is_waited_for():
    left, right = Shared(FULL[:2].clone()), Shared(FULL.t()[:, :3].clone())
    pending = gluon_machine._product(left, right, torch.zeros(2, 3), use_acc=False, is_async=True)
    # A buffer that is freed before the product is waited for may be filled anew.
    right.tensor.fill_(torch.nan)
    assert gluon_machine._wait(0, [pending]).isnan().all()


def test_a_product_that_may_still_be_under_way_is_not_used():
    left, right = Shared(FULL[:2].clone()), Shared(FULL.t()[:, :3].clone())
    first, second = (
        gluon_machine._product(left, right, torch.zeros(2, 3), use_acc=False, is_async=True) for _ in range(2)
    )
    with pytest.raises(RuntimeError, match="adds to one that nobody waited for"):
        gluon_machine._product(left, right, first, is_async=True)
    wanted = (FULL[:2].double() @ FULL.t()[:, :3].double()).float()
    assert torch.equal(gluon_machine._wait(1, [first]), wanted)
    with pytest.raises(RuntimeError, match="may still be under way"):
        gluon_machine._wait(1, [second])
    assert torch.equal(gluon_machine._wait(0, [second]), wanted)
