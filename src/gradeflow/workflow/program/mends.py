"""What is put right in a program where that cannot change one that is right already.

A mend gives the edits of the text; it keeps the program's lines where they are, unless the text begins with a block.
"""

import ast
import collections
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from gradeflow.workflow.operators import OPERATORS, Operator
from gradeflow.workflow.program.checks import has_module_member, tails, unawaited
from gradeflow.workflow.program.reading import ALLOWED_IMPORTS, Reading, dotted, folded, members

_COST = ', self.llm.get_usage_summary()["total_cost"]'
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_EMPTY = {"str": '""', "number": "0", "list": "[]", "dict": "{}", "set": "set()"}
_HOMES = {
    **{name: "typing" for name in typing.__all__ if name[0].isupper()},
    **dict.fromkeys(collections.__all__, "collections"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "DatasetType": "scripts.evaluator",
    "create_llm_instance": "scripts.async_llm",
}


@dataclass(frozen=True, slots=True)
class Edit:
    """`new` in place of what stands between two bytes of a line."""

    line: int
    start: int
    end: int
    new: str


def edited(source: str, edits: Collection[Edit]) -> str:
    lines = source.encode().split(b"\n")
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.end), reverse=True):
        line = lines[edit.line - 1]
        lines[edit.line - 1] = line[: edit.start] + edit.new.encode() + line[edit.end :]
    return b"\n".join(lines).decode()


def mend_operator_case(reading: Reading) -> Iterator[Edit]:
    """`self.Programmer` is `self.programmer`, and `operator.programmer` is `operator.Programmer`."""
    right = {folded(name): name for name in (*reading.instances, *members(reading.modules, OPERATORS))}
    known = {*right.values(), *(reading.attributes or right.values())}
    for node in reading.of(ast.Attribute):
        name = dotted(node)
        if name not in known and (better := right.get(folded(name))):
            yield from _at_end(reading, node, node.attr, better.rpartition(".")[2])


def mend_missing_await(reading: Reading) -> Iterator[Edit]:
    for call, _ in unawaited(reading):
        if _may_await(call, reading):
            parent = reading.parents[call]
            opened = isinstance(parent, ast.Subscript | ast.Attribute) and parent.value is call
            yield Edit(call.lineno, call.col_offset, call.col_offset, "(await " if opened else "await ")
            if opened:
                yield from _at_end(reading, call, "", ")")


def _may_await(call: ast.Call, reading: Reading) -> bool:
    for above, _ in reading.above(call):
        if isinstance(above, ast.JoinedStr | ast.GeneratorExp):
            return False
        if isinstance(above, _SCOPES):
            return isinstance(above, ast.AsyncFunctionDef)
    return False


def mend_missing_import(reading: Reading) -> Iterator[Edit]:
    """A module, or a class of one, that is used under its own name without being imported."""
    names = {found.name for found in reading.unbound if found.certain and not found.local}
    lines = [line for name in sorted(names) if (line := _import_of(name, reading))]
    if lines:
        yield from _at_start(reading, reading.tree.body if reading.workflow else _body(reading.method), lines)


def _import_of(name: str, reading: Reading) -> str:
    if name in _HOMES:
        return f"from {_HOMES[name]} import {name}"
    parents = [reading.parents[node] for node in reading.of(ast.Name) if node.id == name]
    fits = all(isinstance(parent, ast.Attribute) and has_module_member(name, parent.attr) for parent in parents)
    return f"import {name}" if name in ALLOWED_IMPORTS and fits else ""


def mend_missing_initial_value(reading: Reading) -> Iterator[Edit]:
    """A variable that may be unbound gets an empty value of its kind where its function begins."""
    certain = {found.name for found in reading.unbound if found.certain}
    doubtful: dict[ast.AST, dict[str, str]] = {}
    for found in reading.unbound:
        if found.name not in certain and (value := _initial_value(found.name, reading)):
            doubtful.setdefault(found.scope, {})[found.name] = value
    for scope, values in doubtful.items():
        lines = [f"{name} = {value}" for name, value in sorted(values.items())]
        yield from _at_start(reading, _body(scope), lines)


def _initial_value(name: str, reading: Reading) -> str:
    """Nothing for what is bound in another way than by assignment, or deleted."""
    deleted = any(node.id == name and isinstance(node.ctx, ast.Del) for node in reading.of(ast.Name))
    if deleted or reading.defined[name]:
        return ""
    for value in reading.values_of(name):
        for kind in reading.kinds(value, frozenset({name})) if value else ():
            if isinstance(kind, Operator):
                return "{" + ", ".join(f'"{key}": ""' for key in kind.returns) + "}"
            if kind in _EMPTY:
                return _EMPTY[kind]
    answers = (
        node.value.elts[0] for node in reading.returns() if isinstance(node.value, ast.Tuple) and node.value.elts
    )
    return '""' if name in map(dotted, answers) else ""


def mend_missing_return(reading: Reading) -> Iterator[Edit]:
    """A method that ends with `answer, cost`, or with the answer alone, was meant to return it."""
    for last in tails(_body(reading.method)) if reading.method else ():
        match last:
            case ast.Expr(value=ast.Tuple(elts=[_, _])):
                yield Edit(last.lineno, last.col_offset, last.col_offset, "return ")
            case ast.Expr(value=ast.Name() | ast.Subscript() as value) if reading.is_single(value):
                yield Edit(last.lineno, last.col_offset, last.col_offset, "return ")


def mend_missing_cost(reading: Reading) -> Iterator[Edit]:
    """`return answer` gets the cost as its second part, where the answer alone cannot be a pair already."""
    if "self.llm" in (reading.attributes or ()):
        for node in reading.returns():
            if node.value is not None and reading.is_single(node.value):
                yield from _at_end(reading, node.value, "", _COST)


MENDS: dict[str, Callable[[Reading], Iterator[Edit]]] = {
    "operator_case": mend_operator_case,
    "missing_await": mend_missing_await,
    "missing_import": mend_missing_import,
    "missing_initial_value": mend_missing_initial_value,
    "missing_return": mend_missing_return,
    "missing_cost": mend_missing_cost,
}


def _at_end(reading: Reading, node: ast.expr, old: str, new: str) -> Iterator[Edit]:
    """Nothing where the tree's positions do not fit the text, as inside f-strings."""
    line, end = node.end_lineno or 0, node.end_col_offset or 0
    if reading.source.split("\n")[line - 1].encode()[:end].endswith(old.encode()):
        yield Edit(line, end - len(old.encode()), end, new)


def _at_start(reading: Reading, block: list[ast.stmt], lines: list[str]) -> Iterator[Edit]:
    """Before the first statement, after a docstring and what must come before everything else."""
    for statement in block:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(module="__future__"):
                continue
        if not isinstance(statement, (*_BLOCKS, *_SCOPES)):
            new = "".join(f"{line}; " for line in lines)
            yield Edit(statement.lineno, statement.col_offset, statement.col_offset, new)
        else:
            decorators = getattr(statement, "decorator_list", None)
            number = decorators[0].lineno if decorators else statement.lineno
            indent = reading.source.split("\n")[number - 1].encode()[: statement.col_offset].decode()
            new = "".join(f"{line}\n{indent}" for line in lines)
            yield Edit(number, statement.col_offset, statement.col_offset, new)
        return


def _body(scope: ast.AST | None) -> list[ast.stmt]:
    return scope.body if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) else []
