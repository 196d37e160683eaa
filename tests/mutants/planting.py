"""The faults that are planted: one changed operator, constant, condition, call or statement of a module."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax"}
# Types, decorators and texts for people are not what tests of a function can notice.
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}
_SKIPPED_NODES = (ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclass(frozen=True)
class Mutant:
    """A file with one planted fault.

    Attributes:
        file: the module's file, from the root of the repository.
        number: place of the fault among all that can be planted in the file.
        lines: first and last line of the statement that is changed.
        code: the first of these lines.
        before, after: source of what is changed.
    """

    file: str
    number: int
    lines: tuple[int, int]
    code: str
    before: str
    after: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def change(self) -> str:
        """The change on one line, which begins each side of it."""
        before, after = (" ".join(text.split())[:100] for text in (self.before, self.after))
        return f"{before} -> {after}"


@dataclass(frozen=True)
class _Site:
    """A place in a tree, and what can stand there instead."""

    parent: ast.AST
    field: str
    index: int | None
    lines: tuple[int, int]
    node: ast.AST
    instead: ast.AST

    def put(self) -> None:
        if self.index is None:
            setattr(self.parent, self.field, self.instead)
        else:
            getattr(self.parent, self.field)[self.index] = self.instead


def mutants_of(file: str) -> list[Mutant]:
    """All faults that can be planted in a file."""
    text = Path(file).read_text()
    tree, lines = ast.parse(text), text.splitlines()
    return [
        Mutant(
            file,
            number,
            site.lines,
            lines[site.lines[0] - 1].strip(),
            ast.unparse(site.node),
            ast.unparse(site.instead),
        )
        for number, site in enumerate(_sites(tree, (1, 1)))
    ]


def planted(mutant: Mutant) -> ast.Module:
    """The tree of a file with its fault."""
    tree = ast.parse(Path(mutant.file).read_text())
    for number, site in enumerate(_sites(tree, (1, 1))):
        if number == mutant.number:
            site.put()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"{mutant.file} has no fault {mutant.number}: it changed since the faults were listed")


def _sites(node: ast.AST, lines: tuple[int, int]) -> Iterator[_Site]:
    for field, value in ast.iter_fields(node):
        if field in _SKIPPED_FIELDS:
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or isinstance(child, _SKIPPED_NODES) or _is_declaration(node, child):
                continue
            here = _header(child) if isinstance(child, ast.stmt) else lines
            for instead in _instead_of(child):
                yield _Site(node, field, index, here, child, instead)
            # A message's wording is its own affair; that there is an error at all is not.
            if not isinstance(child, ast.Raise):
                yield from _sites(child, here)


def _is_declaration(parent: ast.AST, node: ast.AST) -> bool:
    """Whether a node is a docstring, a list of exports or a type's other name."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(parent, ast.Module) and isinstance(node, ast.Assign):
        is_exports = isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
        is_union = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
        return is_exports or is_union
    return False


def _header(statement: ast.stmt) -> tuple[int, int]:
    """Lines of a statement without those of the statements in it."""
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno or statement.lineno
    return statement.lineno, max(last, statement.lineno)


def _instead_of(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield changed
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.BinOp(op=ast.BitOr()):
            yield node.left
        case ast.BinOp() if type(node.op) in _OPERATORS:
            yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant():
            for value in _values_beside(node.value):
                yield ast.Constant(value)
        case ast.If() | ast.While() | ast.IfExp() if _is_plain_condition(node.test):
            changed_condition = copy.copy(node)
            changed_condition.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed_condition
        case ast.comprehension():
            for place, condition in enumerate(node.ifs):
                if _is_plain_condition(condition):
                    changed_loop = copy.copy(node)
                    changed_loop.ifs = [*node.ifs]
                    changed_loop.ifs[place] = ast.UnaryOp(ast.Not(), condition)
                    yield changed_loop
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
            if type(node.op) in _OPERATORS:
                yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield ast.Call(ast.Name(_NAMES[name], ast.Load()), node.args, node.keywords)
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in _NAMES:
            yield ast.Call(ast.Attribute(of, _NAMES[name], ast.Load()), node.args, node.keywords)
        case ast.Slice():
            if node.lower is not None:
                yield ast.Slice(None, node.upper, node.step)
            if node.upper is not None:
                yield ast.Slice(node.lower, None, node.step)


def _is_plain_condition(condition: ast.expr) -> bool:
    """Whether a condition has no operator whose own change would turn it round."""
    is_not = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
    return not is_not and not isinstance(condition, ast.Compare)


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _values_beside(value: object) -> tuple[bool | int | float, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value + 1, value - 1
    if isinstance(value, float):
        return (value * 2 if value else 1.0,)
    return ()
