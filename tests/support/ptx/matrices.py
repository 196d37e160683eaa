"""Opcodes of the tensor cores: matrices from and to shared memory, products of warps and of warpgroups."""

import numpy as np

from tests.support.ptx.block import Block, Mask, opcode
from tests.support.ptx.fragments import ELEMENT_BYTES, fragments_of, left_fragments
from tests.support.ptx.parsing import Fault, Instruction, elements


@opcode("mma", "row col satfinite m16n8k16 m16n8k8 m16n8k32 e4m3")
def warp_product(b: Block, i: Instruction, mask: Mask) -> None:
    total, left, right, _ = i.parts[-4:]
    if left not in ELEMENT_BYTES or (i.has("satfinite") and total != "s32"):
        raise Fault(f"unknown product: {i.text}")
    if not (mask.reshape(-1, 32).all(1) | ~mask.reshape(-1, 32).any(1)).all():
        raise Fault(f"threads of a warp part at a product: {i.text}")
    results, lefts, rights, totals = (elements(each) for each in i.operands)
    rights_held = fragments_of(b, rights, right)
    # Registers, columns, threads of a column, elements: thread 4 g + t has rows from t on of column g.
    inner = len(rights) * 4 * rights_held.shape[-1]
    other = rights_held.transpose(1, 0, 3, 4, 2).reshape(b.warps, inner, 8)
    product = left_fragments(b, lefts, left) @ other
    # Rows g and g + 8, and of each columns 2 t and 2 t + 1.
    by_register = product.reshape(b.warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, b.threads)
    for register, old, new in zip(results, totals, by_register, strict=True):
        summed = new + b.read(old, total)
        b.write(register, summed.clip(-(2**31), 2**31 - 1) if i.has("satfinite") else summed, total, mask)


@opcode("ldmatrix stmatrix", "m8n8 x1 x2 x4 trans shared")
def matrices(b: Block, i: Instruction, mask: Mask) -> None:
    loads = i.opcode == "ldmatrix"
    vector, place = i.operands if loads else i.operands[::-1]
    addresses, registers = b.address(place).reshape(b.warps, 32), elements(vector)
    chosen = np.nonzero(mask.reshape(-1, 32).all(1))[0]
    if mask.sum() != 32 * len(chosen):
        raise Fault(f"threads of a warp part at a matrix: {i.text}")
    count = len(registers)
    # Thread 8 n + r has the address of row r of matrix n; thread 4 r + c holds columns 2 c and 2 c + 1 of its row r.
    rows, agents = addresses[chosen, : 8 * count].reshape(-1), np.repeat(chosen, 8 * count)
    shape = len(chosen), count, 8, 8
    if loads:
        held = b.shared.load(agents, rows, 16, i.text).view(np.uint16).reshape(shape)
        held = held.swapaxes(2, 3) if i.has("trans") else held
        words = np.zeros((count, b.warps, 32), np.uint32)
        words[:, chosen] = np.ascontiguousarray(held.swapaxes(0, 1)).view(np.uint32).reshape(count, -1, 32)
        for register, word in zip(registers, words.reshape(count, -1), strict=True):
            b.set(register, word, mask)
    else:
        words = np.stack([b.words(each, 4).reshape(b.warps, 32)[chosen] for each in registers], 1)
        held = words.view(np.uint16).reshape(shape)
        held = held.swapaxes(2, 3) if i.has("trans") else held
        b.shared.store(agents, rows, np.ascontiguousarray(held).reshape(-1, 8), i.text)


@opcode(
    "wgmma",
    "mma_async fence commit_group wait_group e4m3 "
    + " ".join(f"m64n{columns}k{inner}" for columns in range(8, 257, 8) for inner in (16, 32)),
)
def asynchronous_product(b: Block, i: Instruction, mask: Mask) -> None:
    for warpgroup in np.unique(b.warp[mask] // 4):
        if mask[128 * warpgroup : 128 * warpgroup + 128].sum() != 128:
            raise Fault(f"threads of a warpgroup part at a product: {i.text[:90]}")
        if i.has("mma_async"):
            b.products.begin(int(warpgroup), i)
        elif i.has("commit_group"):
            b.products.commit(int(warpgroup))
        elif i.has("wait_group"):
            b.products.wait(int(warpgroup), int(i.operands[0], 0))
