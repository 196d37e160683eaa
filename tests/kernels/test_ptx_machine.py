"""The PTX machine held to itself: what is right runs and computes, and each planted fault is reported."""

import numpy as np
import pytest
import torch

from tests.support.ptx.launching import Arguments, run
from tests.support.ptx.parsing import Fault, parse
from tests.support.ptx.races import Race
from tests.support.tables import in_one_test

WAIT = """
{{
    waiting:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [{barrier}], {parity};
    @!complete bra.uni waiting;
}}
"""


def program(body, pointers=1, threads=64):
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 p{number}" for number in range(pointers))
    loads = "".join(f"ld.param.u64 %g{number}, [p{number}];\n" for number in range(pointers))
    return parse(
        f".visible .entry kernel({parameters})\n.reqntid {threads}\n{{\n.reg .pred %p<9>;\n{loads}"
        f"mov.u32 %t, %tid.x;\nshr.u32 %w, %t, 5;\nmul.wide.u32 %at, %t, 4;\n{body}\nret;\n}}"
    )


def ran(body, *tensors, threads=64, grid=(1,), shared=32768, before=None):
    arguments = Arguments()
    for tensor in tensors:
        arguments.add_tensor(tensor)
    return run(program(body, len(tensors), threads), grid, threads, shared, arguments, before)


def numbers(count):
    return torch.arange(count, dtype=torch.int32)


EXCHANGE = """
    add.u64 %from, %g0, %at;  ld.global.b32 %x, [%from];
    mul.lo.u32 %mine, %t, 4;  st.shared.b32 [%mine], %x;
    {between}
    xor.b32 %other, %mine, 128;  ld.shared.b32 %y, [%other];
    add.u64 %to, %g1, %at;  st.global.b32 [%to], %y;
"""


def test_warps_exchange_through_shared_memory_behind_a_barrier():
    taken, given = numbers(64), torch.zeros(64, dtype=torch.int32)
    ran(EXCHANGE.format(between="bar.sync 0;"), taken, given)
    assert torch.equal(given, taken.roll(32))


@in_one_test("between", ["", "bar.warp.sync -1;"])
def test_without_one_it_is_a_race(between):
    with pytest.raises(Race, match=r"read beside a store: ld\.shared"):
        ran(EXCHANGE.format(between=between), numbers(64), numbers(64))


@in_one_test("second", ["", "bar.sync 0;"])
def test_what_is_read_may_be_overwritten_once_all_have_read_it(second):
    body = EXCHANGE.format(between="bar.sync 0;") + second + "st.shared.b32 [%mine], %y;"
    if second:
        ran(body, numbers(64), numbers(64))
    else:
        with pytest.raises(Race, match="overwritten beside a load"):
            ran(body, numbers(64), numbers(64))


ASYNC_COPY = """
    add.u64 %from, %g0, %at;  mul.lo.u32 %mine, %t, 4;
    cp.async.ca.shared.global [%mine], [%from], 4;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %y, [%mine];
    add.u64 %to, %g1, %at;  st.global.b32 [%to], %y;
"""


def test_a_copy_that_was_waited_for_is_there():
    taken, given = numbers(64), torch.zeros(64, dtype=torch.int32)
    ran(ASYNC_COPY.format(wait="cp.async.wait_group 0;"), taken, given)
    assert torch.equal(given, taken)


@in_one_test("wait", ["", "cp.async.wait_group 1;"])
def test_one_that_was_not_is_reported(wait):
    with pytest.raises(Race, match="a copy that was not waited for is read"):
        ran(ASYNC_COPY.format(wait=wait), numbers(64), numbers(64))


FREE = "mbarrier.arrive.shared::cta.b64 _, [1032];"
# One thread brings 8 rows of 16 numbers, twice, to the same place; all of its warp read them.
BULK = """
    setp.eq.u32 %p1, %t, 0;  setp.eq.u32 %p2, %w, 1;
    @%p1 mbarrier.init.shared::cta.b64 [1024], 1;
    @%p1 mbarrier.init.shared::cta.b64 [1032], 32;
    bar.sync 0;
    @!%p2 bra brings;
    mov.u32 %round, 0;  mov.u32 %sum, 0;
    again:
    {full}
    sub.u32 %mine, %t, 32;  mul.lo.u32 %mine, %mine, 4;  ld.shared.b32 %x, [%mine];  add.u32 %sum, %sum, %x;
    {free}
    add.u32 %round, %round, 1;  setp.lt.u32 %p3, %round, 2;
    @%p3 bra again;
    add.u64 %to, %g1, %at;  st.global.b32 [%to], %sum;
    bra end;
    brings:
    @!%p1 bra end;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [1024], 512;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [0], [%map, {{0, 0}}], [1024];
    {wait}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [1024], 512;
    cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [0], [%map, {{0, 8}}], [1024];
    end:
"""


def bulk(full="%round", wait="0", free=FREE, early=""):
    """Both rounds' sums, with these parities to wait for; who reads says `free` then, or `early` before it reads."""

    class Descriptor:
        base = numbers(256).reshape(16, 16)
        shape, strides = (16, 16), (16, 1)

    given, arguments = torch.zeros(64, dtype=torch.int32), Arguments()
    arguments.add_tensor_map(Descriptor, {"elem_type": 3, "swizzle": 0, "block_size": [8, 16]})
    # Shape and strides, which the kernel does not take.
    del arguments.words[1:]
    arguments.add_tensor(given)
    waits = [WAIT.format(barrier=1024, parity=full), WAIT.format(barrier=1032, parity=wait) if wait else ""]
    body = BULK.format(full=waits[0] + early, wait=waits[1], free=free)
    text = program(body.replace("%map", "%g0"), 2)
    # The map's address, and not what stands there.
    loads = [each for each in text.instructions if each.opcode == "ld" and each.operands[1] == "[p0]"]
    loads[0].parts, loads[0].operands = ("mov", "u64"), ("%g0", "p0")
    run(text, (1,), 64, 2048, arguments)
    return given


def test_bulk_copies_hand_over_by_phases():
    assert torch.equal(bulk()[32:], 2 * numbers(32) + 128)


def test_a_phase_too_early_reads_what_has_not_landed():
    with pytest.raises(Race, match="beside a load"):
        bulk(full="1")


def test_a_phase_too_late_never_comes():
    with pytest.raises(Fault, match=r"hangs.*1032: phase 0, 32 of 32 arrivals"):
        bulk(free="")


def test_a_buffer_is_overwritten_before_it_is_free():
    with pytest.raises(Race, match="overwritten beside a load"):
        bulk(free="", early=FREE)
    for wait in ("", "1"):
        with pytest.raises(Fault, match="more arrivals than a phase"):
            bulk(wait=wait)


INIT, INVAL = "mbarrier.init.shared::cta.b64 [1024], 1;", "mbarrier.inval.shared::cta.b64 [1024];"
# As Triton handed a number to warps in the memory of a barrier that no warp used: both halves are stored, and read.
HANDED = """
    setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared::cta.b64 [1024], 1;
    bar.sync 0;  {between}
    @%p1 st.shared.v2.b32 [{place}], {{7, 9}};
    bar.sync 0;
    ld.shared.b32 %x, [{place}+4];  add.u64 %to, %g0, %at;  st.global.b32 [%to], %x;
"""


def handed(place=1024, between=""):
    given = torch.zeros(64, dtype=torch.int32)
    ran(HANDED.format(place=place, between=between), given)
    return given


def test_the_memory_of_a_valid_mbarrier_holds_nothing_else():
    with pytest.raises(Race, match=r"that of a valid mbarrier and is written: @%p1 st\.shared"):
        handed()
    assert handed(place=1032).eq(9).all()
    assert handed(between=f"@%p1 {INVAL} bar.sync 0;").eq(9).all()


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("ld.shared.b32 %x, [1028];", "that of a valid mbarrier and is read"),
        ("ld.shared.v4.b32 {%x, %y, %z, %u}, [1024];", "that of a valid mbarrier and is read"),
        ("mov.u32 %x, 0;  st.shared.b8 [1031], %x;", "that of a valid mbarrier and is written"),
        ("cp.async.ca.shared.global [1024], [%g0], 4;", "that of a valid mbarrier and is written"),
        (f"@%p1 {INIT}", "initialized again without"),
        (f"@%p1 {INVAL} bar.sync 0; @%p1 {INVAL}", "no mbarrier is at 1024"),
    ],
)
def test_a_valid_mbarrier_is_reached_by_mbarrier_operations_alone(access, message):
    with pytest.raises(Fault, match=message):
        handed(place=2048, between=access)


def test_an_mbarrier_is_initialized_again_once_it_is_invalidated():
    assert handed(place=2048, between=f"@%p1 {INVAL} @%p1 {INIT}").eq(9).all()


def test_an_mbarrier_is_used_by_those_alone_who_know_that_it_is_valid():
    init = "setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [1024], 64;"
    wait = "mbarrier.arrive.shared::cta.b64 _, [1024];" + WAIT.format(barrier=1024, parity=0)
    ran(init + "bar.sync 0;" + wait, numbers(64))
    with pytest.raises(Race, match="used beside its initialization"):
        ran(init + wait, numbers(64))


# A warpgroup stores A and B, both of ones, and multiplies them: 64 by 8 over 16.
PRODUCT = """
    mul.lo.u32 %mine, %t, 16;
    st.shared.v4.b32 [%mine], {{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00}};
    add.u32 %next, %mine, 2048;
    st.shared.v4.b32 [%next], {{0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00}};
    {fence}
    bar.sync 0;
    mov.b32 %d0, 0f00000000; mov.b32 %d1, 0f00000000; mov.b32 %d2, 0f00000000; mov.b32 %d3, 0f00000000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%d0, %d1, %d2, %d3}}, 0x0000000800400000, 0x0000000800400080,
        1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {wait}
    add.f32 %sum, %d0, %d3;
    {then}
    add.u64 %to, %g0, %at;  st.global.b32 [%to], %sum;
"""
FENCE, WAITED = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"


def product(fence=FENCE, wait=WAITED, then=""):
    given = torch.zeros(128)
    ran(PRODUCT.format(fence=fence, wait=wait, then=then), given, threads=128)
    return given


def test_a_product_that_was_waited_for_is_right():
    assert product().eq(32).all()


def test_stores_reach_the_tensor_cores_through_a_fence():
    with pytest.raises(Race, match="by the tensor cores without a fence"):
        product(fence="")


def test_registers_of_a_product_under_way_are_not_touched():
    with pytest.raises(Fault, match=r"registers of a product that was not waited for: add\.f32"):
        product(wait="")


def test_operands_of_a_product_under_way_are_not_overwritten():
    with pytest.raises(Race, match="overwritten beside a load"):
        product(wait="st.shared.b32 [%mine], 0;" + WAITED)
    product(then="bar.sync 0; st.shared.b32 [%mine], 0;")


def test_blocks_that_reach_the_same_place_need_an_atomic_between_them():
    """The last block to arrive adds up what each one left."""
    body = """
        setp.eq.u32 %p1, %t, 0;  mul.wide.u32 %mine, %ctaid.x, 4;
        @!%p1 bra end;
        add.u64 %slot, %g0, %mine;  st.global.b32 [%slot], 7;
        {arrive}
        setp.eq.u32 %p2, %before, 3;
        @!%p2 bra end;
        ld.global.v4.b32 {{%a, %b, %c, %d}}, [%g0];  add.u32 %a, %a, %b;  add.u32 %c, %c, %d;  add.u32 %a, %a, %c;
        st.global.b32 [%g1+4], %a;
        end:
    """
    slots, counted = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    ran(body.format(arrive="atom.global.gpu.acq_rel.add.u32 %before, [%g1], 1;"), slots, counted, grid=(4,))
    assert counted.tolist() == [4, 28]
    counted.zero_()
    with pytest.raises(Race, match="a tensor is read beside a store"):
        ran(body.format(arrive="atom.global.gpu.relaxed.add.u32 %before, [%g1], 1;"), slots, counted, grid=(4,))


COPY = "add.u64 %from, %g0, %at; ld.global.b32 %x, [%from]; add.u64 %to, %g1, %at; {early} st.global.b32 [%to], %x;"
WAIT_FOR_LAUNCH = "griddepcontrol.wait;"


def test_a_dependent_launch_waits_before_it_reaches_what_the_one_before_does():
    a, b, c, d = (numbers(64) + i for i in range(4))
    first = ran(COPY.format(early=""), a, b)
    ran(WAIT_FOR_LAUNCH + COPY.format(early=""), b, c, before=[first])
    assert torch.equal(c, numbers(64))
    for source, target in ((b, c), (c, a), (c, b)):
        with pytest.raises(Race, match="without griddepcontrol"):
            ran(COPY.format(early=""), source, target, before=[first])
    # What the launch before only reads may be read; and a launch may store once it has waited.
    second = ran(COPY.format(early=WAIT_FOR_LAUNCH), a, d, before=[first])
    # The second may not have waited yet when the third begins.
    with pytest.raises(Race, match="without griddepcontrol"):
        ran(COPY.format(early=WAIT_FOR_LAUNCH), b, c, before=[first, second])
    # One that is not dependent begins when all are done.
    ran(COPY.format(early=""), b, c)


@in_one_test(
    ("body", "message"),
    [
        ("add.u64 %from, %g0, 256; ld.global.b32 %x, [%from];", "outside of all tensors"),
        ("sub.u64 %from, %g0, 4; st.global.b32 [%from], 0;", "outside of all tensors"),
        ("ld.global.b32 %x, [%g0+2];", "misaligned"),
        ("st.shared.b32 [32768], 0;", "misaligned or out of bounds"),
        ("bar.sync 1, 96;", r"hangs: 64 threads wait at barriers \(barrier 1: 64 of 96\)"),
        ("fancy.b32 %x, %t;", "unknown instruction: fancy"),
        ("add.sat.s32 %x, %t, %t;", "unknown modifiers sat"),
        ("add.u32 %x, %never, 1;", "%never is read before it is written"),
    ],
)
def test_what_a_gpu_would_refuse_or_nobody_knows_is_a_fault(body, message):
    with pytest.raises(Fault, match=message):
        ran(body, numbers(64))


def test_a_barrier_orders_those_alone_who_meet_at_it():
    """Three warps; the first two meet, and the third reads what they wrote."""
    body = """
        mul.lo.u32 %mine, %t, 4;  setp.lt.u32 %p1, %w, 2;
        @!%p1 bra last;
        st.shared.b32 [%mine], %t;  bar.sync 1, 64;  bra end;
        last: ld.shared.b32 %y, [0];
        end: ret;
    """
    with pytest.raises(Race):
        ran(body, numbers(1), threads=96)
    ran(body.replace("1, 64", "1, 96").replace("last: ", "last: bar.sync 1, 96; "), numbers(1), threads=96)


def test_a_warp_waits_for_its_own_copies_alone():
    swapped = ASYNC_COPY.replace("ld.shared.b32 %y, [%mine]", "xor.b32 %o, %mine, 128; ld.shared.b32 %y, [%o]")
    with pytest.raises(Race):
        ran(swapped.format(wait="cp.async.wait_group 0;"), numbers(64), numbers(64))
    ran(swapped.format(wait="cp.async.wait_group 0; bar.sync 0;"), numbers(64), numbers(64))


def test_each_warp_waits_for_itself():
    half = "setp.eq.u32 %p1, %w, 0; @%p1 griddepcontrol.wait;"
    first = ran(COPY.format(early=""), a := numbers(64), b := numbers(64))
    with pytest.raises(Race, match="without griddepcontrol"):
        ran(half + COPY.format(early=""), b, a, before=[first])


def test_sums_of_codes_stop_at_the_ends_of_their_type():
    body = """
        mov.u32 %a, 0x7f7f7f7f;
        mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32
            {%d0, %d1, %d2, %d3}, {%a, %a, %a, %a}, {%a, %a}, {2147000000, 0, 0, -2147483648};
        mul.wide.u32 %to, %t, 16;  add.u64 %to, %g0, %to;  st.global.v4.b32 [%to], {%d0, %d1, %d2, %d3};
    """
    given = torch.zeros(32, 4, dtype=torch.int32)
    ran(body, given, threads=32)
    product = 32 * 127 * 127
    assert given.unique(dim=0).tolist() == [[2**31 - 1, product, product, product - 2**31]]


def test_warp_products_of_halves_and_of_codes_are_numpys():
    """Fragments as PTX's tables have them: thread 4g + t holds rows g and g + 8, and columns from 2t or 4t on."""
    generator = np.random.default_rng(0)
    for kind, inner, total in (("f16", 16, "f32"), ("s8", 32, "s32")):
        count = inner // 8
        a = generator.integers(-9, 9, (16, inner)).astype(np.float16 if kind == "f16" else np.int8)
        b = generator.integers(-9, 9, (8, inner)).astype(a.dtype)
        words = np.zeros((32, 6), np.uint32)
        for thread in range(32):
            g, t = thread // 4, thread % 4
            places = [(g, 0), (g + 8, 0), (g, inner // 2), (g + 8, inner // 2)]
            parts = [a[row, column + t * count : column + (t + 1) * count] for row, column in places]
            parts += [b[g, column + t * count : column + (t + 1) * count] for column in (0, inner // 2)]
            words[thread] = [np.ascontiguousarray(part).view(np.uint32)[0] for part in parts]
        given = torch.zeros(32, 4, dtype=torch.int32)
        body = f"""
            mul.wide.u32 %from, %t, 24;  add.u64 %from, %g0, %from;
            ld.global.v2.b32 {{%a0, %a1}}, [%from];  ld.global.v2.b32 {{%a2, %a3}}, [%from+8];
            ld.global.v2.b32 {{%b0, %b1}}, [%from+16];
            mma.sync.aligned.m16n8k{inner}.row.col.{total}.{kind}.{kind}.{total}
                {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{0, 0, 0, 0}};
            mul.wide.u32 %to, %t, 16;  add.u64 %to, %g1, %to;  st.global.v4.b32 [%to], {{%d0, %d1, %d2, %d3}};
        """
        ran(body, torch.from_numpy(words.view(np.int32)), given, threads=32)
        got = given.numpy().view(np.float32 if total == "f32" else np.int32)
        wanted = a.astype(np.int64) @ b.astype(np.int64).T
        for thread in range(32):
            g, t = thread // 4, thread % 4
            assert np.array_equal(got[thread, :2], wanted[g, 2 * t : 2 * t + 2])
            assert np.array_equal(got[thread, 2:], wanted[g + 8, 2 * t : 2 * t + 2])
