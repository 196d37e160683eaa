"""A block of threads: registers, memory, and which of its threads runs next.

Of the threads that can go on, those at the earliest instruction are executed together, whatever warp they are of. So
diverged threads meet again where the program joins. A thread whose `try_wait` fails stands still until a barrier
changes; only when nobody can go on does the oldest bulk copy land.
"""

from collections.abc import Callable

import numpy as np

from tests.support.ptx.copies import Copies
from tests.support.ptx.memory import Bytes, GlobalMemory, SharedMemory, Words
from tests.support.ptx.parsing import SIZES, Fault, Instruction, Program
from tests.support.ptx.products import Products
from tests.support.ptx.races import Bools, Clocks, Ints
from tests.support.ptx.values import Array, from_words, to_words

Mask = Bools
Handler = Callable[["Block", Instruction, Mask], None]
OPCODES: dict[str, tuple[Handler, frozenset[str]]] = {}
# Where parameters stand that kernels take the address of, in 32 bits.
PARAMETERS = 0xF000_0000
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
        self.constants: dict[str, Words] = {}
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
        code, end = self.program.instructions, len(self.program.instructions)
        while not done.all():
            able = ~(done | self.spinning | (self.barrier >= 0))
            if not able.any():
                self._unblock(done)
                continue
            here = int(at[able].min())
            if here >= end:
                done |= able & (at >= end)
                continue
            mask = able & (at == here)
            instruction = code[here]
            self.executed += 1
            if self.executed > _MOST_STEPS:
                raise Fault(f"{self.program.name} executed {_MOST_STEPS} instructions: it does not end")
            chosen = mask
            if instruction.predicate:
                chosen = mask & (self.read(instruction.predicate, "pred") != instruction.negated)
            at[mask] = here + 1
            if not chosen.any():
                continue
            if instruction.opcode == "bra":
                at[chosen] = instruction.target
            elif instruction.opcode == "brx":
                at[chosen] = np.array(instruction.targets)[self.raw(instruction.operands[0])[chosen].astype(np.int64)]
            elif instruction.opcode in ("ret", "exit"):
                done |= chosen
            else:
                self._execute(instruction, chosen)

    def _execute(self, instruction: Instruction, mask: Mask) -> None:
        if instruction.opcode not in OPCODES:
            raise Fault(f"unknown instruction: {instruction.text}")
        handler, modifiers = OPCODES[instruction.opcode]
        unknown = [part for part in instruction.parts[1:] if part not in modifiers and part not in _ANYWHERE]
        if unknown:
            raise Fault(f"unknown modifiers {', '.join(unknown)}: {instruction.text}")
        if self.products.under_way:
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

    def raw(self, operand: str) -> Words:
        """Words of a register, a special register, an address or a number."""
        held = self.registers.get(operand)
        if held is None:
            held = self.constants.get(operand)
        if held is None:
            held = self.constants[operand] = self._constant(operand)
        return held

    def _constant(self, operand: str) -> Words:
        if operand.startswith("%"):
            return self._special(operand)
        if operand == "global_smem":
            return np.zeros(self.threads, np.uint64)
        if operand in self.parameters:
            return np.full(self.threads, PARAMETERS + list(self.parameters).index(operand) * 128, np.uint64)
        try:
            digits = operand.rstrip("U")
            number = int(digits[2:], 16) if digits[:2] in ("0f", "0F", "0d", "0D") else int(digits, 0)
        except ValueError:
            raise Fault(f"unknown operand {operand}") from None
        return np.full(self.threads, number & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _special(self, operand: str) -> Words:
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

    def read(self, operand: str, kind: str) -> Array:
        """Numbers of a type; for "pred" truths, of a register that may be negated."""
        if kind == "pred":
            if operand.startswith("!"):
                return ~self.read(operand[1:], kind)
            truths: Array = self.raw(operand) != 0
            return truths
        return from_words(self.raw(operand), kind)

    def write(self, operand: str, numbers: Array, kind: str, mask: Mask) -> None:
        """Set a register of some threads to numbers of a type; truths for "pred"."""
        if operand == "_":
            return
        new = numbers.astype(np.bool_) if kind == "pred" else to_words(numbers, kind)
        if not mask.all():
            old = self.registers.get(operand)
            new = np.where(mask, new, np.zeros_like(new) if old is None else old)
        self.registers[operand] = new

    def address(self, operand: str) -> Words:
        """Addresses that an operand in brackets names."""
        base, _, offset = operand.strip("[] ").partition("+")
        words = self.raw(base.strip())
        return words + np.uint64(int(offset, 0) & 0xFFFFFFFFFFFFFFFF) if offset.strip() else words

    def one(self, operand: str, mask: Mask) -> int:
        """An operand's word where all chosen threads have the same.

        Raises:
            Fault: they differ.
        """
        words = np.unique(self.raw(operand)[mask])
        if len(words) != 1:
            raise Fault(f"threads disagree on {operand}")
        return int(words[0])

    def one_address(self, operand: str, mask: Mask) -> int:
        """An address that all chosen threads agree on."""
        addresses = np.unique(self.address(operand)[mask])
        if len(addresses) != 1:
            raise Fault(f"threads disagree on {operand}")
        return int(addresses[0])

    def loaded(self, space: str, addresses: Words, nbytes: int, mask: Mask, text: str) -> Bytes:
        """Bytes [threads, nbytes] from memory, zeros for threads that ask for none."""
        chosen = np.nonzero(mask)[0]
        taken = np.zeros((self.threads, nbytes), np.uint8)
        if space == "shared":
            taken[chosen] = self.shared.load(self.warp[chosen], addresses[chosen], nbytes, text)
        else:
            taken[chosen] = self.memory.load(self.clocks, self.warp[chosen], addresses[chosen], nbytes, text)
        return taken

    def stored(self, space: str, addresses: Words, values: Bytes, mask: Mask, text: str) -> None:
        """Store bytes [threads, n]."""
        chosen = np.nonzero(mask)[0]
        if space == "shared":
            self.shared.store(self.warp[chosen], addresses[chosen], values[chosen], text)
        else:
            self.memory.store(self.clocks, self.warp[chosen], addresses[chosen], values[chosen], text)


_ANYWHERE = {*SIZES, "pred", "sync", "aligned", "uni"}
