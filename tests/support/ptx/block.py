"""A block of threads: registers, memory, and which of its threads runs next.

Of the threads that can go on, those at the earliest instruction are executed together, whatever warp they are of. So
diverged threads meet again where the program joins. They are chosen anew where another thread stands, and behind each
instruction that branches or that others may wait for. A thread whose `try_wait` fails stands still until a barrier
changes; only when nobody can go on does the oldest bulk copy land.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from tests.support.ptx.copies import Copies
from tests.support.ptx.memory import GlobalMemory, SharedMemory
from tests.support.ptx.parsing import SIZES, Fault, Instruction, Program
from tests.support.ptx.products import Products
from tests.support.ptx.races import Bools, Clocks, Ints
from tests.support.ptx.values import BITS, Array, from_words, to_words

Mask = Bools
Handler = Callable[["Block", Instruction, Mask], None]
OPCODES: dict[str, tuple[Handler, frozenset[str]]] = {}
# Where parameters stand that kernels take the address of, in 32 bits.
PARAMETERS = 0xF000_0000
# A tensor map is as large.
PARAMETER_BYTES = 128
_MOST_STEPS = 20_000_000


def opcode(names: str, modifiers: str = "") -> Callable[[Handler], Handler]:
    """Declare that a function executes these opcodes, and which modifiers it understands beside types."""

    def declared(handler: Handler) -> Handler:
        for name in names.split():
            OPCODES[name] = handler, frozenset(modifiers.split())
        return handler

    return declared


class Block:
    """One block of a launch.

    Attributes:
        lane, warp: each thread's place in its warp, and its warp.
        registers: words by name, and predicates.
        everyone: the mask of all threads; handlers are given this one where all execute an instruction.
        tensor_maps: fields of tensor maps, by address.
    """

    def __init__(
        self,
        program: Program,
        threads: int,
        shared_bytes: int,
        memory: GlobalMemory,
        parameters: dict[str, int],
        tensor_maps: dict[int, dict[str, int]],
        place: tuple[int, int, int],
        grid: tuple[int, int, int],
    ) -> None:
        self.program, self.threads, self.memory, self.parameters = program, threads, memory, parameters
        self.place, self.grid, self.tensor_maps = place, grid, tensor_maps
        self.lane: Ints = np.arange(threads) % 32
        self.warp: Ints = np.arange(threads) // 32
        self.warps = threads // 32
        self.clocks = Clocks(self.warps)
        self.shared = SharedMemory(shared_bytes, self.clocks, program.finest_store)
        self.copies = Copies(self)
        self.products = Products(self)
        self.registers: dict[str, Array] = {}
        self.constants: dict[tuple[str, str], Array] = {}
        self.everyone: Mask = np.ones(threads, np.bool_)
        self.spinning: Mask = np.zeros(threads, np.bool_)
        # Barrier that each thread waits at, and how many threads it is for.
        self.barrier: Ints = np.full(threads, -1)
        self.expected: dict[int, int] = {}
        self.executed = 0

    def run(self) -> None:
        """Run all threads to their end.

        Raises:
            Fault: as the package says.
        """
        at: Ints = np.zeros(self.threads, np.int64)
        done: Mask = np.zeros(self.threads, np.bool_)
        code, stops = self.program.instructions, self.program.stops
        while not done.all():
            able = ~(done | self.spinning | (self.barrier >= 0))
            if not able.any():
                self._unblock(done)
                continue
            here = int(at[able].min())
            if here >= len(code):
                done |= able & (at >= len(code))
                continue
            mask = able & (at == here)
            later = at[able ^ mask]
            last = min(stops[here], int(later.min())) if later.size else stops[here]
            if mask.all():
                mask = self.everyone
            for instruction in code[here:last]:
                self._execute(instruction, self._chosen(instruction, mask))
            at[mask] = last
            self.executed += last - here
            if self.executed > _MOST_STEPS:
                raise Fault(f"{self.program.name} executed {_MOST_STEPS} instructions: it does not end")
            if last == here:
                self._stop_at(code[here], here, mask, at, done)

    def _stop_at(self, instruction: Instruction, here: int, mask: Mask, at: Ints, done: Mask) -> None:
        """Execute an instruction behind which other threads may be able to go on."""
        self.executed += 1
        at[mask] = here + 1
        chosen = self._chosen(instruction, mask)
        if chosen is None:
            return
        if instruction.opcode == "bra":
            at[chosen] = instruction.target
        elif instruction.opcode == "brx":
            numbers = self.read(instruction.operands[0], "u32")[chosen]
            at[chosen] = np.array(instruction.targets)[numbers.astype(np.int64)]
        elif instruction.opcode in ("ret", "exit"):
            done |= chosen
        else:
            self._execute(instruction, chosen)

    def _chosen(self, instruction: Instruction, mask: Mask) -> Mask | None:
        """Threads of a mask that execute an instruction, or None if none do."""
        if not instruction.predicate:
            return mask
        truths = self.read(instruction.predicate, "pred")
        chosen = mask & ~truths if instruction.negated else mask & truths
        if not chosen.any():
            return None
        return mask if np.array_equal(chosen, mask) else chosen

    def _execute(self, instruction: Instruction, mask: Mask | None) -> None:
        if mask is None:
            return
        handler = instruction.handler
        if handler is None:
            handler = instruction.handler = _handler(instruction)
        if self.products.busy and not instruction.names.isdisjoint(self.products.busy):
            self.products.check_registers(instruction, mask)
        handler(self, instruction, mask)

    def _unblock(self, done: Mask) -> None:
        if self.copies.land_one():
            return
        waiting = self.barrier >= 0
        state = ", ".join(f"barrier {b}: {int((self.barrier == b).sum())} of {n}" for b, n in self.expected.items())
        raise Fault(
            f"{self.program.name} hangs: {int(waiting.sum())} threads wait at barriers ({state}), "
            f"{int(self.spinning.sum())} at mbarriers ({self.copies.state()}), {int(done.sum())} are done"
        )

    def arrive(self, barrier: int, count: int, mask: Mask) -> None:
        """Let threads wait at a barrier of so many, and go on if they are the last."""
        if self.expected.setdefault(barrier, count) != count:
            raise Fault(f"barrier {barrier} is for {self.expected[barrier]} threads and for {count}")
        self.barrier[mask] = barrier
        there = self.barrier == barrier
        if there.sum() >= count:
            self.clocks.meet(np.unique(self.warp[there]).tolist())
            self.barrier[there] = -1
            del self.expected[barrier]

    # Operands

    def raw(self, operand: str) -> Array:
        """Words of a register in the width that it was written in, of a special register, an address or a number."""
        held = self.registers.get(operand)
        return self._fixed(operand, "") if held is None else held

    def words(self, operand: str, size: int) -> Array:
        """Words of so many bytes."""
        return self.read(operand, f"u{8 * size}")

    def read(self, operand: str, kind: str) -> Array:
        """Numbers of a type; for "pred" truths, of a register that may be negated."""
        held = self.registers.get(operand)
        if held is None:
            if kind == "pred" and operand[0] == "!":
                return ~self.read(operand[1:], kind)
            return self._fixed(operand, kind)
        if kind != "pred":
            return from_words(held, kind)
        return held if held.dtype == np.bool_ else held != 0

    def _fixed(self, operand: str, kind: str) -> Array:
        """What is no register, as numbers of a type."""
        held = self.constants.get((operand, kind))
        if held is None:
            words = self._constant(operand)
            held = words if not kind else words != 0 if kind == "pred" else from_words(words, kind)
            self.constants[operand, kind] = held
        return held

    def _constant(self, operand: str) -> Array:
        if operand.startswith("%"):
            return self._special(operand)
        if operand == "global_smem":
            return np.zeros(self.threads, np.uint64)
        if operand in self.parameters:
            return np.full(self.threads, PARAMETERS + list(self.parameters).index(operand) * PARAMETER_BYTES, np.uint64)
        try:
            digits = operand.rstrip("U")
            number = int(digits[2:], 16) if digits[:2] in ("0f", "0F", "0d", "0D") else int(digits, 0)
        except ValueError:
            raise Fault(f"unknown operand {operand}") from None
        return np.full(self.threads, number & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _special(self, operand: str) -> Array:
        axes = {axis: i for i, axis in enumerate("xyz")}
        name, _, axis = operand.removeprefix("%").partition(".")
        if name == "tid":
            return np.arange(self.threads, dtype=np.uint64) if axis == "x" else np.zeros(self.threads, np.uint64)
        if name == "laneid":
            return self.lane.astype(np.uint64)
        known = {"ctaid": self.place, "nctaid": self.grid, "clusterid": self.place, "ntid": (self.threads, 1, 1)}
        if self.program.declares(operand):
            # Compilers leave a register unset where nothing comes of it.
            return np.full(self.threads, 0xFFFFFFFFFFFFFFFF, np.uint64)
        if name not in known:
            raise Fault(f"register {operand} is read before it is written")
        return np.full(self.threads, known[name][axes[axis]], np.uint64)

    def write(self, operand: str, numbers: Array, kind: str, mask: Mask) -> None:
        """Set a register of some threads to numbers of a type; truths for "pred"."""
        self.set(operand, numbers.astype(np.bool_, copy=False) if kind == "pred" else to_words(numbers, kind), mask)

    def set(self, operand: str, words: Array, mask: Mask) -> None:
        """Set a register of some threads to words of any width."""
        if operand == "_":
            return
        if mask is not self.everyone:
            old = self.registers.get(operand)
            words = np.where(mask, words, words.dtype.type(0) if old is None else old)
        self.registers[operand] = words

    def address(self, operand: str) -> Array:
        """Addresses that an operand in brackets names, in 64 bits."""
        base, offset = _address(operand)
        words = self.read(base, "u64")
        return words + np.uint64(offset) if offset else words

    def parameter(self, operand: str, mask: Mask) -> Array:
        """A parameter's word, or that of several whose addresses stand in a register.

        Raises:
            Fault: no parameter begins there.
        """
        words = np.array([word & 0xFFFFFFFFFFFFFFFF for word in self.parameters.values()], np.uint64)
        numbers, within = np.divmod(self.address(operand).astype(np.int64) - PARAMETERS, PARAMETER_BYTES)
        if (mask & ((numbers < 0) | (numbers >= len(words)) | (within != 0))).any():
            raise Fault(f"no parameter begins at {operand}")
        return words.take(numbers, mode="clip")

    def one(self, operand: str, mask: Mask) -> int:
        """An operand's word where all chosen threads have the same.

        Raises:
            Fault: they differ.
        """
        return _agreed(self.raw(operand)[mask], operand)

    def one_address(self, operand: str, mask: Mask) -> int:
        """An address that all chosen threads agree on."""
        return _agreed(self.address(operand)[mask], operand)

    def loaded(self, space: str, addresses: Array, size: int, count: int, mask: Mask, text: str) -> Array:
        """So many words of so many bytes from memory [threads, count], zeros for threads that ask for none."""
        warps = self.warp
        if mask is not self.everyone:
            warps, addresses = warps[mask], addresses[mask]
        if space == "shared":
            cells = self.shared.load(warps, addresses, size * count, text)
        else:
            cells = self.memory.load(self.clocks, warps, addresses, size * count, text)
        taken = cells.view(BITS[size]).reshape(-1, count)
        if mask is self.everyone:
            return taken
        spread = np.zeros((self.threads, count), taken.dtype)
        spread[mask] = taken
        return spread

    def stored(self, space: str, addresses: Array, values: Array, mask: Mask, text: str) -> None:
        """Store words [threads, n]."""
        warps = self.warp
        if mask is not self.everyone:
            warps, addresses, values = warps[mask], addresses[mask], values[mask]
        if space == "shared":
            self.shared.store(warps, addresses, values, text)
        else:
            self.memory.store(self.clocks, warps, addresses, values, text)


_ANYWHERE = {*SIZES, "pred", "sync", "aligned", "uni"}


def _handler(instruction: Instruction) -> Handler:
    """What executes an instruction.

    Raises:
        Fault: nobody knows it, or a part of its name.
    """
    if instruction.opcode not in OPCODES:
        raise Fault(f"unknown instruction: {instruction.text}")
    handler, modifiers = OPCODES[instruction.opcode]
    unknown = [part for part in instruction.parts[1:] if part not in modifiers and part not in _ANYWHERE]
    if unknown:
        raise Fault(f"unknown modifiers {', '.join(unknown)}: {instruction.text}")
    return handler


@cache
def _address(operand: str) -> tuple[str, int]:
    """Register and offset of an operand in brackets."""
    base, _, offset = operand.strip("[] ").partition("+")
    return base.strip(), int(offset, 0) & 0xFFFFFFFFFFFFFFFF if offset.strip() else 0


def _agreed(words: Array, operand: str) -> int:
    if (words != words[0]).any():
        raise Fault(f"threads disagree on {operand}")
    return int(words[0])
