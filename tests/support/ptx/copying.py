"""Opcodes of asynchronous copies, of the mbarriers that count them, and of tensor maps."""

import numpy as np

from tests.support.ptx.block import Block, Mask, opcode
from tests.support.ptx.copies import AsyncCopy, BulkCopy
from tests.support.ptx.parsing import Instruction, elements


@opcode(
    "cp",
    "async bulk tensor 2d 1d shared global ca cg commit_group wait_group wait_all read L2::128B "
    "L2::256B L2::cache_hint mbarrier::complete_tx::bytes",
)
def copy(b: Block, i: Instruction, mask: Mask) -> None:
    warps = np.unique(b.warp[mask]).tolist()
    if i.has("bulk") and not i.has("tensor"):
        # Groups of bulk stores, of which there are none.
        return
    if i.has("commit_group"):
        for warp in warps:
            b.copies.commit(warp)
    elif i.has("wait_group") or i.has("wait_all"):
        for warp in warps:
            if i.has("wait_all"):
                b.copies.commit(warp)
            b.copies.wait(warp, 0 if i.has("wait_all") else int(i.operands[0], 0))
    elif i.has("tensor"):
        tensor_map, _, coordinates = i.operands[1].strip("[] ").partition(",")
        at = [b.read(each, "s32") for each in elements(coordinates)]
        target, barrier, maps = b.address(i.operands[0]), b.address(i.operands[2]), b.raw(tensor_map.strip())
        for thread in np.nonzero(mask)[0]:
            warp = int(b.warp[thread])
            known = b.clocks.of(warp)
            b.clocks.tick(warp)
            place = tuple(int(each[thread]) for each in at)
            places = int(target[thread]), int(maps[thread])
            b.copies.bulk.append(BulkCopy(*places, place, int(barrier[thread]), warp, known, i.text))
    else:
        threads, nbytes = np.nonzero(mask)[0], int(i.operands[2], 0)
        read = b.raw(i.operands[3])[threads] if len(i.operands) > 3 else np.full(len(threads), nbytes)
        target, source = (b.address(each)[threads] for each in i.operands[:2])
        b.copies.ask(AsyncCopy(threads, target, source, nbytes, read.astype(np.int64), i.text))


@opcode(
    "mbarrier", "init inval try_wait test_wait arrive expect_tx parity shared noComplete release acquire cta relaxed"
)
def count_arrivals(b: Block, i: Instruction, mask: Mask) -> None:
    threads = np.nonzero(mask)[0]
    warp = int(b.warp[threads[0]])
    if i.has("init"):
        b.copies.init(b.one_address(i.operands[0], mask), b.one(i.operands[1], mask), warp, i.text)
    elif i.has("inval"):
        b.copies.invalidate(b.one_address(i.operands[0], mask), warp, i.text)
    elif i.has("try_wait") or i.has("test_wait"):
        addresses, parity = b.address(i.operands[1]).tolist(), (b.words(i.operands[2], 4) & np.uint32(1)).tolist()
        asked: dict[tuple[int, int, int], bool] = {}
        passed = np.zeros(b.threads, np.bool_)
        for thread in threads.tolist():
            what = addresses[thread], parity[thread], thread // 32
            if what not in asked:
                asked[what] = b.copies.passed(*what, i.text)
            passed[thread] = asked[what]
        b.write(i.operands[0], passed, "pred", mask)
        b.spinning |= mask & ~passed
    else:
        place = i.operands[1] if i.operands[0] == "_" else i.operands[0]
        addresses = b.address(place)
        nbytes = b.raw(i.operands[-1]) if i.has("expect_tx") else np.zeros(b.threads, np.uint64)
        for thread in threads.tolist():
            b.copies.arrive(int(addresses[thread]), int(b.warp[thread]), int(nbytes[thread]), i.text)


@opcode(
    "tensormap",
    "replace tile global_address rank box_dim global_dim global_stride element_stride elemtype "
    "interleave_layout swizzle_mode fill_mode shared global b1024 cp_fenceproxy tensormap::generic release gpu",
)
def change_tensor_map(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("cp_fenceproxy"):
        target, source = (b.one_address(each, mask) for each in i.operands[:2])
        b.tensor_maps[target] = dict(b.tensor_maps[source])
        return
    fields = b.tensor_maps.setdefault(b.one_address(i.operands[0], mask), {})
    name = i.parts[3]
    if len(i.operands) == 3:
        name = f"{name} {int(i.operands[1], 0)}"
    fields[name] = b.one(i.operands[-1], mask)
