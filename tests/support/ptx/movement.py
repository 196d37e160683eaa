"""Loads, stores, moves, conversions, exchanges within a warp, barriers and fences, atomics."""

import numpy as np

from tests.support.ptx.block import Block, Mask, opcode
from tests.support.ptx.parsing import SIZES, Fault, Instruction, elements
from tests.support.ptx.values import BITS, FLOATS, Array, as_integers, float32_to_e4m3, flushed, joined, to_words

_ROUNDINGS = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


@opcode(
    "ld",
    "param global shared volatile relaxed acquire gpu cta v2 v4 nc L1::evict_last L1::evict_first L1::no_allocate "
    "L2::cache_hint",
)
def load(b: Block, i: Instruction, mask: Mask) -> None:
    size, targets = SIZES[i.type], elements(i.operands[0])
    if i.has("param"):
        b.set(targets[0], b.parameter(i.operands[1], mask), mask)
        return
    space = "shared" if i.has("shared") else "global"
    taken = b.loaded(space, b.address(i.operands[1]), size, len(targets), mask, i.text)
    for target, words in zip(targets, np.ascontiguousarray(taken.T), strict=True):
        b.set(target, _filled(words, i.type) if i.type in ("s8", "s16") else words, mask)


@opcode("st", "global shared volatile relaxed release gpu cta v2 v4 L1::evict_last L1::evict_first L2::cache_hint")
def store(b: Block, i: Instruction, mask: Mask) -> None:
    values = np.stack([b.words(each, SIZES[i.type]) for each in elements(i.operands[1])], 1)
    b.stored("shared" if i.has("shared") else "global", b.address(i.operands[0]), values, mask, i.text)


@opcode("mov")
def move(b: Block, i: Instruction, mask: Mask) -> None:
    target, source = i.operands
    if i.type == "pred":
        b.set(target, b.read(source, "pred"), mask)
    elif target.startswith("{"):
        parts = elements(target)
        words = b.words(source, SIZES[i.type]).view(BITS[SIZES[i.type] // len(parts)]).reshape(-1, len(parts))
        for part, word in zip(parts, np.ascontiguousarray(words.T), strict=True):
            b.set(part, word, mask)
    elif source.startswith("{"):
        parts = elements(source)
        words = np.stack([b.words(each, SIZES[i.type] // len(parts)) for each in parts], 1)
        b.set(target, words.view(BITS[SIZES[i.type]])[:, 0], mask)
    else:
        b.set(target, b.words(source, SIZES[i.type]), mask)


def _filled(words: Array, kind: str) -> Array:
    """Narrow signed numbers, which fill the register that they go to."""
    return words.view(np.int8 if kind == "s8" else np.int16).astype(np.int32).view(np.uint32)


@opcode("cvta", "to global shared param")
def convert_address(b: Block, i: Instruction, mask: Mask) -> None:
    b.set(i.operands[0], b.raw(i.operands[1]), mask)


@opcode("cvt", "rn rni rmi rpi rzi ftz sat satfinite relu pack")
def convert(b: Block, i: Instruction, mask: Mask) -> None:
    into, source = i.parts[-2:]
    if i.has("sat") or i.has("relu") or i.has("pack"):
        raise Fault(f"unknown conversion: {i.text}")
    if into in ("f16x2", "bf16x2", "e4m3x2") and source == "f32":
        high, low = (b.read(each, "f32") for each in i.operands[1:])
        if into == "e4m3x2":
            words = np.stack([float32_to_e4m3(low), float32_to_e4m3(high)], 1).view(np.uint16)[:, 0]
        else:
            words = joined(low, high, into)
        b.set(i.operands[0], words, mask)
        return
    numbers = b.read(i.operands[1], source)
    if i.has("ftz") and source == "f32":
        numbers = flushed(numbers)
    if source in FLOATS and into not in FLOATS:
        rounded = next((f for name, f in _ROUNDINGS.items() if i.has(name)), np.trunc)
        numbers = as_integers(numbers, rounded, into)
    elif source in FLOATS and into == source and any(map(i.has, _ROUNDINGS)):
        numbers = next(f for name, f in _ROUNDINGS.items() if i.has(name))(numbers)
    words = to_words(numbers, into)
    b.set(i.operands[0], _filled(words, into) if into in ("s8", "s16") else words, mask)


@opcode("shfl", "bfly idx up down")
def shuffle(b: Block, i: Instruction, mask: Mask) -> None:
    words, by = b.words(i.operands[1], 4), b.words(i.operands[2], 4).view(np.int32)
    ways: dict[str, Array] = {"bfly": b.lane ^ by, "idx": by & 31, "down": b.lane + by, "up": b.lane - by}
    source = ways[next(way for way in ways if i.has(way))]
    source = np.where((source >= 0) & (source < 32), source, b.lane)
    b.set(i.operands[0].split("|")[0], words[b.warp * 32 + source], mask)


@opcode("vote", "ballot any all")
def vote(b: Block, i: Instruction, mask: Mask) -> None:
    said = (b.read(i.operands[1], "pred") & mask).reshape(-1, 32)
    if i.has("ballot"):
        b.set(i.operands[0], _bits(said), mask)
    else:
        agreed = said.any(1) if i.has("any") else (said | ~mask.reshape(-1, 32)).all(1)
        b.write(i.operands[0], np.repeat(agreed, 32), "pred", mask)


@opcode("redux", "min max add")
def reduce(b: Block, i: Instruction, mask: Mask) -> None:
    numbers = b.read(i.operands[1], i.type).reshape(-1, 32)
    reduced = (
        numbers.min(1) if i.has("min") else numbers.max(1) if i.has("max") else numbers.sum(1, dtype=numbers.dtype)
    )
    b.write(i.operands[0], np.repeat(reduced, 32), i.type, mask)


@opcode("elect")
def elect(b: Block, i: Instruction, mask: Mask) -> None:
    b.write(i.operands[0].split("|")[1], b.lane == 0, "pred", mask)


@opcode("activemask")
def active_mask(b: Block, i: Instruction, mask: Mask) -> None:
    b.set(i.operands[0], _bits(mask.reshape(-1, 32)), mask)


def _bits(truths: Array) -> Array:
    """Truths of each warp [warps, 32] as the bits of a word, for each of its threads."""
    return np.repeat((truths.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32), 32)


@opcode("bar barrier", "warp arrive cta")
def barrier(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("warp"):
        return
    if i.has("arrive"):
        raise Fault(f"unknown barrier: {i.text}")
    count = int(i.operands[1], 0) if len(i.operands) > 1 else b.threads
    b.arrive(b.one(i.operands[0], mask), count, mask)


@opcode(
    "fence membar",
    "proxy async shared global acq_rel sc cta gpu sys gl cluster mbarrier_init release acquire tensormap::generic",
)
def fence(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("proxy") and i.has("async"):
        for warp in np.unique(b.warp[mask]):
            b.clocks.fence(int(warp))


@opcode(
    "griddepcontrol setmaxnreg createpolicy nanosleep discard prefetch",
    "wait launch_dependents inc dec fractional L2::evict_last L2::evict_first L2::evict_normal global L1 L2",
)
def without_effect(b: Block, i: Instruction, mask: Mask) -> None:
    """What changes when something happens, and not what is computed."""
    if i.opcode == "griddepcontrol" and i.has("wait"):
        b.memory.dependence.waited.update(np.unique(b.warp[mask]).tolist())
    if i.opcode == "createpolicy":
        b.set(i.operands[0], np.zeros(b.threads, np.uint64), mask)


@opcode("atom", "global shared acq_rel relaxed gpu cta sys add min max or and exch cas")
def atomic(b: Block, i: Instruction, mask: Mask) -> None:
    if not i.has("add") or not i.has("global"):
        raise Fault(f"unknown atomic: {i.text}")
    size, addresses, added = SIZES[i.type], b.address(i.operands[1]), b.read(i.operands[2], i.type)
    before = np.zeros(b.threads, added.dtype)
    for thread in np.nonzero(mask)[0]:
        alone = np.arange(b.threads) == thread
        if i.has("acq_rel"):
            b.memory.accesses.atomic(b.clocks, int(b.warp[thread]), int(addresses[thread]))
        before[thread] = b.loaded("global", addresses, size, 1, alone, i.text)[thread, 0].view(added.dtype)
        b.stored("global", addresses, (before + added).view(BITS[size])[:, None], alone, i.text)
        if i.has("acq_rel"):
            b.memory.accesses.atomic(b.clocks, int(b.warp[thread]), int(addresses[thread]))
    b.set(i.operands[0], before.view(BITS[size]), mask)
