"""The tests of a function that its problem shows: what the docstring says that calls of it give.

They are read from the problem's text alone, so that nothing can come with them that a policy may not see.
"""

import ast
import doctest
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# `f(2) == 4`, and the other ways in which docstrings say so.
_GIVES = re.compile(r"\s*(?:={1,2}>|==?|->|➞|(?:#\s*)?(?:should )?returns?\b)\s*")


@dataclass(frozen=True, slots=True)
class PublicTest:
    """A call and the literal that it should give, as Python text."""

    call: str
    expected: str

    def __str__(self) -> str:
        return f"assert {self.call} == {self.expected}"


def read(problem: str, entry_point: str) -> tuple[PublicTest, ...]:
    """The examples in the docstring of `entry_point`; those that are no call with a literal result are left out."""
    found = function(problem, entry_point)
    docstring = (ast.get_docstring(found) if found else None) or ""
    return tuple(dict.fromkeys([*_doctests(docstring), *_sayings(docstring, entry_point)]))


def function(problem: str, entry_point: str) -> ast.FunctionDef | None:
    """The function that a problem written in Python asks for; None where it is none, or not written so."""
    try:
        tree = ast.parse(problem)
    except _UNREADABLE:
        return None
    named = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point)
    return next(named, None)


def as_text(tests: Sequence[PublicTest]) -> str:
    return "\n".join(map(str, tests))


def _doctests(docstring: str) -> Iterator[PublicTest]:
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # inconsistent indents
        return
    for example in examples:
        call, expected = _expression(example.source), _literal(example.want)
        if call and expected:
            yield PublicTest(call, expected)


def _sayings(docstring: str, entry_point: str) -> Iterator[PublicTest]:
    """Lines such as `f(2) => 4`."""
    for line in docstring.splitlines():
        start = line.find(f"{entry_point}(")
        if start < 0 or (line[:start].strip() not in {"", "*", "-", "for", "For", "#", ">>>"}):
            continue
        said = line[start:]
        for sign in _GIVES.finditer(said):
            call, expected = _plain_call(said[: sign.start()]), _literal(said[sign.end() :])
            if call and expected:
                yield PublicTest(call, expected)
                break


def _expression(text: str) -> str:
    """The text as one line, where it is a single expression with a call in it."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except _UNREADABLE:
        return ""
    return ast.unparse(tree) if any(isinstance(node, ast.Call) for node in ast.walk(tree)) else ""


def _plain_call(text: str) -> str:
    """The same, where it is a call with nothing but literals: a line of prose may show one with variables."""
    expression = _expression(text)
    called = ast.parse(expression, mode="eval").body if expression else None
    if not isinstance(called, ast.Call):
        return ""
    values = [*called.args, *(keyword.value for keyword in called.keywords)]
    return expression if all(_literal(ast.unparse(value)) for value in values) else ""


def _literal(text: str) -> str:
    """The text as a literal of Python's, without a full stop; empty where it is none."""
    for plain in (text.strip(), text.strip().removesuffix(".")):
        try:
            return repr(ast.literal_eval(plain))
        except (*_UNREADABLE, TypeError):
            continue
    return ""
