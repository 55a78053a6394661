"""Programs that are wrong in one place: valid ones, mutated. What is wrong is found by running them."""

import ast
import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gradeflow.workflow.operators import OPERATORS
from support.stand_in import run
from support.workflows import PROGRAMS

Node = TypeVar("Node", bound=ast.AST)

RUNS = range(16)
"""The seeds of the runs over a program's branches."""


@dataclass(frozen=True)
class Mutant:
    source: str
    mutator: str
    classes: frozenset[str]
    """What its runs died of."""

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.source.encode()).digest()[0] % 2 == 1


@functools.cache
def mutants(each: int = 60) -> tuple[Mutant, ...]:
    """At most so many of each mutator; a mutation after which no run fails in a new way is none."""
    found: list[Mutant] = []
    for name, mutate in MUTATORS.items():
        drawn = sorted(
            {source for program in PROGRAMS for source in mutate(program, ast.parse(program))} - set(PROGRAMS)
        )
        random.Random(name).shuffle(drawn)
        made: list[Mutant] = []
        for source in drawn:
            classes = {failure for seed in RUNS if (failure := run(source, seed).failure)} - {"runtime"}
            if classes and len(made) < each:
                made.append(Mutant(source, name, frozenset(classes)))
        found += made
    return tuple(found)


Mutate = Callable[[str, ast.Module], Iterator[str]]


def drop_assignment(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Assign):
        if isinstance(node.targets[0], ast.Name):
            yield _line_of(source, node, "pass")
    for node in _nodes(tree, ast.If):
        for part in (*node.body, *node.orelse):
            if not isinstance(part, ast.Return | ast.Raise):
                yield _line_of(source, part, "pass")


def guard_assignment(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Assign):
        if isinstance(node.targets[0], ast.Name) and node.lineno == node.end_lineno:
            text = ast.get_source_segment(source, node) or ""
            yield _line_of(source, node, f"if len(problem) > 40: {text}")


def rename_variable(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in {"str", "self"}:
            yield _swapped(source, node, f"{node.id}s")


def drop_import(source: str, tree: ast.Module) -> Iterator[str]:
    for node in (*_nodes(tree, ast.Import), *_nodes(tree, ast.ImportFrom)):
        yield _line_of(source, node, "pass")


def drop_await(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Await):
        yield _swapped(source, node, ast.get_source_segment(source, node.value) or "")


def drop_return(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Return):
        value = ast.get_source_segment(source, node.value) if node.value else ""
        yield from (_line_of(source, node, text) for text in ("pass", "return", value or "pass"))
        if isinstance(node.value, ast.Tuple):
            yield _line_of(source, node, f"return {value}, 1")


def change_keyword(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.keyword):
        if node.arg and isinstance(node.value, ast.expr):
            value = ast.get_source_segment(source, node.value)
            for name in (f"{node.arg}s", "prompt", "text"):
                yield _swapped(source, node, f"{name}={value}")


def change_operator(source: str, tree: ast.Module) -> Iterator[str]:
    attributes = {operator.attribute for operator in OPERATORS.values()}
    for node in _nodes(tree, ast.Attribute):
        if node.attr in OPERATORS or node.attr in attributes:
            owner = ast.get_source_segment(source, node.value)
            for name in (f"{node.attr}_agent", "think", node.attr.title(), node.attr.upper()):
                yield _swapped(source, node, f"{owner}.{name}")


def read_stdin(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Assign):
        yield _swapped(source, node.value, "input()")
        yield _swapped(source, node.value, 'input("Problem: ")')
    for node in _nodes(tree, ast.Name):
        if node.id == "problem":
            yield _swapped(source, node, "input()")
            yield "import sys\n" + _swapped(source, node, "sys.stdin.read()")


def change_attribute(source: str, tree: ast.Module) -> Iterator[str]:
    for node in _nodes(tree, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            yield _swapped(source, node, f"{ast.get_source_segment(source, node.value)}.{node.slice.value}")
    for node in _nodes(tree, ast.Attribute):
        yield _swapped(source, node, f"{ast.get_source_segment(source, node.value)}.{node.attr}_of")
        yield _swapped(source, node, f"{ast.get_source_segment(source, node.value)}.{node.attr[:-1]}")


def break_syntax(source: str, _: ast.Module) -> Iterator[str]:
    for place, sign in enumerate(source):
        if sign in ':()[]"=':
            yield source[:place] + source[place + 1 :]


MUTATORS: dict[str, Mutate] = {
    mutate.__name__: mutate
    for mutate in (
        drop_assignment,
        guard_assignment,
        rename_variable,
        drop_import,
        drop_await,
        drop_return,
        change_keyword,
        change_operator,
        read_stdin,
        change_attribute,
        break_syntax,
    )
}


def _nodes(tree: ast.Module, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def _line_of(source: str, node: ast.stmt, text: str) -> str:
    """The program with other text for a statement."""
    rows = source.split("\n")
    rows[node.lineno - 1 : node.end_lineno] = [rows[node.lineno - 1][: node.col_offset] + text]
    return "\n".join(rows)


def _swapped(source: str, node: ast.expr | ast.keyword, text: str) -> str:
    """The program with other text for an expression, which stands on one line."""
    rows = source.split("\n")
    row = rows[node.lineno - 1]
    inside_text = node.lineno != node.end_lineno or not row[node.col_offset : node.end_col_offset].strip()
    rows[node.lineno - 1] = row if inside_text else row[: node.col_offset] + text + row[node.end_col_offset :]
    return "\n".join(rows)
