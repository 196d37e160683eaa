"""Opcodes of the tensor cores: matrices from and to shared memory, products of warps and of warpgroups."""

import numpy as np

from tests.support.ptx.block import Block, Mask, opcode
from tests.support.ptx.fragments import ELEMENT_BYTES, elements_of, left_fragments
from tests.support.ptx.parsing import Fault, Instruction, elements


@opcode("mma", "row col satfinite m16n8k16 m16n8k8 m16n8k32 e4m3")
def warp_product(b: Block, i: Instruction, mask: Mask) -> None:
    total, left, right, _ = i.parts[-4:]
    if left not in ELEMENT_BYTES or i.has("satfinite"):
        raise Fault(f"unknown product: {i.text}")
    if not (mask.reshape(-1, 32).all(1) | ~mask.reshape(-1, 32).any(1)).all():
        raise Fault(f"threads of a warp part at a product: {i.text}")
    results, lefts, rights, totals = (elements(each) for each in i.operands)
    lane, count = np.arange(32), 4 // ELEMENT_BYTES[left]
    a = left_fragments(b, lefts, left)
    other = np.zeros((b.warps, a.shape[2], 8), np.float64)
    for number, register in enumerate(rights):
        values = elements_of(b, register, right)
        for each in range(count):
            other[:, lane % 4 * count + each + 4 * count * number, lane // 4] = values[..., each]
    product = a @ other
    for number, (register, old) in enumerate(zip(results, totals, strict=True)):
        row, column = lane // 4 + 8 * (number // 2), lane % 4 * 2 + number % 2
        b.write(register, product[:, row, column].reshape(-1) + b.read(old, total), total, mask)


@opcode("ldmatrix stmatrix", "m8n8 x1 x2 x4 trans shared")
def matrices(b: Block, i: Instruction, mask: Mask) -> None:
    loads = i.opcode == "ldmatrix"
    vector, place = i.operands if loads else i.operands[::-1]
    addresses, registers = b.address(place).reshape(b.warps, 32), elements(vector)
    chosen = np.nonzero(mask.reshape(-1, 32).all(1))[0]
    if mask.sum() != 32 * len(chosen):
        raise Fault(f"threads of a warp part at a matrix: {i.text}")
    lane, agents = np.arange(32), np.repeat(chosen, 8)
    for number, register in enumerate(registers):
        rows = addresses[chosen, 8 * number : 8 * number + 8].reshape(-1)
        if loads:
            matrix = b.shared.load(agents, rows, 16, i.text).view(np.uint16).reshape(-1, 8, 8)
            matrix = matrix.transpose(0, 2, 1) if i.has("trans") else matrix
            low, high = (matrix[:, lane // 4, 2 * (lane % 4) + half].astype(np.uint64) for half in (0, 1))
            words = np.zeros((b.warps, 32), np.uint64)
            words[chosen] = low | high << np.uint64(16)
            b.write(register, words.reshape(-1), "u64", mask)
        else:
            words = b.raw(register).reshape(b.warps, 32)[chosen]
            matrix = np.zeros((len(chosen), 8, 8), np.uint16)
            for half in (0, 1):
                matrix[:, lane // 4, 2 * (lane % 4) + half] = words >> np.uint64(16 * half) & np.uint64(0xFFFF)
            matrix = matrix.transpose(0, 2, 1) if i.has("trans") else matrix
            b.shared.store(agents, rows, np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 16), i.text)


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
