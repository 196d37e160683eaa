"""PTX text as a program: its entry's parameters, its instructions in order, and where its branches lead."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property


class Fault(Exception):
    """What a GPU would refuse, hang on or leave undefined, or what the machine does not know."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the entry: its name and number of bytes."""

    name: str
    size: int


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        parts: the opcode and its modifiers, without the state space's `::cta`.
        operands: its operands, vectors with their braces and addresses with their brackets.
        predicate: register that must be true, or false where `negated`; empty where it always runs.
        text: the statement as the compiler wrote it.
        target: number of the instruction that a branch leads to.
        targets: numbers that an indexed branch chooses from.
        names: registers and whatever else its operands name.
        handler: what executes it, once it was looked up.
    """

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str
    negated: bool
    text: str
    target: int = -1
    targets: tuple[int, ...] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    handler: Callable[..., None] | None = None

    @property
    def opcode(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last type that the opcode names."""
        return self.parts[-1]

    def has(self, modifier: str) -> bool:
        return modifier in self.parts


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        threads: number of threads of a block that it asks for, or 0.
        ranges: number of registers of each range, by its name.
        finest_store: number of bytes of its narrowest store to shared memory.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    ranges: dict[str, int] = field(default_factory=dict)

    @cached_property
    def stops(self) -> list[int]:
        """Number of the next instruction, from each one on, that branches or that other threads may wait for."""
        last, found = len(self.instructions), []
        for number, instruction in reversed([*enumerate(self.instructions)]):
            last = number if instruction.opcode in _STOPS else last
            found.append(last)
        return found[::-1]

    def declares(self, register: str) -> bool:
        """Whether a range of registers that the entry declares holds one of this name."""
        found = re.fullmatch(r"(%\D+)(\d+)", register)
        return found is not None and int(found[2]) < self.ranges.get(found[1], 0)

    @cached_property
    def finest_store(self) -> int:
        sizes = [SIZES[i.type] for i in self.instructions if i.opcode == "st" and i.has("shared") and i.type in SIZES]
        return min([*sizes, 4])


# Bytes of a type.
SIZES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "s16x2", "u16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
}
_STOPS = ("bra", "brx", "ret", "exit", "bar", "barrier", "mbarrier")
_BLANK = re.compile(r"\s*")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+(\w+)(?:\[(\d+)\])?"
)
_OPERAND = re.compile(r"\{[^}]*\}(?:\|[^,\s]+)?|\[[^\]]*\]|[^,\s](?:[^,{\[]*[^,\s{\[])?")
_REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*")
_KEPT_MODIFIERS = re.compile(r"^(shared|global|param|local)(::\w+)*$")


def parse(ptx: str) -> Program:
    """The one entry of PTX text.

    Raises:
        Fault: the text has no entry, or a branch leads nowhere.
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\.(?:loc|file)\s[^\n]*", "", ptx, flags=re.S)
    head = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", text, flags=re.S)
    if not head:
        raise Fault("the text has no entry")
    parameters = tuple(
        Parameter(name, SIZES[kind] * int(count or 1)) for kind, name, count in _PARAMETER.findall(head[2])
    )
    threads = re.search(r"\.reqntid\s+(\d+)", head[3])
    body = text[head.end() :]
    ranges = {name: int(count) for name, count in re.findall(r"\.reg\s+\.\w+\s+(%\w+)<(\d+)>", body)}
    return Program(head[1], parameters, int(threads[1]) if threads else 0, _Body(body).instructions(), ranges)


class _Body:
    """Statements of an entry. Braces open scopes with labels of their own, as inline assembly has them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[Instruction, tuple[int, ...]]] = []
        self.labels: dict[tuple[tuple[int, ...], str], int] = {}
        self.tables: dict[str, list[str]] = {}

    def instructions(self) -> tuple[Instruction, ...]:
        self._read()
        for instruction, scope in self.found:
            if instruction.opcode == "bra":
                instruction.target = self._place(instruction.operands[0], scope)
            if instruction.opcode == "brx":
                table = self.tables[instruction.operands[1]]
                instruction.targets = tuple(self._place(label, scope) for label in table)
        return tuple(instruction for instruction, _ in self.found)

    def _read(self) -> None:
        at, opened, last_label = 0, 0, ""
        scope: tuple[int, ...] = (0,)
        while True:
            at = _BLANK.match(self.text, at).end()  # type: ignore[union-attr]  # it always matches
            if self.text[at] == "{":
                opened += 1
                scope = (*scope, opened)
                at += 1
            elif self.text[at] == "}":
                scope = scope[:-1]
                at += 1
                if not scope:
                    return
            elif label := _LABEL.match(self.text, at):
                last_label = label[1]
                self.labels[scope, last_label] = len(self.found)
                at = label.end()
            else:
                end = self.text.index(";", at)
                self._statement(" ".join(self.text[at:end].split()), scope, last_label)
                at = end + 1

    def _statement(self, text: str, scope: tuple[int, ...], last_label: str) -> None:
        if text.startswith(".branchtargets"):
            self.tables[last_label] = [each.strip() for each in text.removeprefix(".branchtargets").split(",")]
        elif text and not text.startswith("."):
            self.found.append((read_instruction(text), scope))

    def _place(self, label: str, scope: tuple[int, ...]) -> int:
        for depth in range(len(scope), 0, -1):
            if (scope[:depth], label) in self.labels:
                return self.labels[scope[:depth], label]
        raise Fault(f"a branch leads to {label}, which is nowhere")


def read_instruction(text: str) -> Instruction:
    """One statement as an instruction."""
    rest, predicate, negated = text, "", False
    if guard := re.match(r"@(!?)(%?[\w$]+)\s+", text):
        negated, predicate = bool(guard[1]), guard[2]
        rest = text[guard.end() :]
    opcode, _, operands = rest.partition(" ")
    parts = tuple(_KEPT_MODIFIERS.sub(r"\1", part) for part in opcode.split("."))
    found = tuple(each.strip() for each in _OPERAND.findall(operands))
    names = frozenset(name for each in found for name in _REGISTER.findall(each))
    return Instruction(parts, found, predicate, negated, text, names=names)


@cache
def elements(vector: str) -> tuple[str, ...]:
    """Operands of a vector, or the operand itself where it is none."""
    return tuple(each.strip() for each in vector.strip("{} ").split(","))
