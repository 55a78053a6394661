"""MBPP: short Python functions with three or so assertions each (google-research/google-research, mbpp/).

Full rows: `task_id`, `text`, `code`, `test_list`, `test_setup_code`, `challenge_test_list`. Sanitized rows:
`source_file`, `task_id`, `prompt`, `code`, `test_imports`, `test_list`; AFlow's add `entry_point`, and the signature to
the prompt. As the paper does, the problem shows a test, which is what tells the function's name and arguments.

Some tests use a class or an import of the reference solution: these go with them.
"""

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import kept, python, shown, text, texts, whole
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

_HUB = "https://huggingface.co/datasets/google-research-datasets/mbpp/resolve/4bb6404fdc6cacfda99d4ac4205087b89d32030c"

PUBLISHED = Published(
    home="https://github.com/google-research/google-research/tree/master/mbpp",
    licence="CC-BY-4.0",
    attribution="Austin et al.: Program Synthesis with Large Language Models, arXiv:2108.07732 (2021)",
    files=(
        File(
            "train",
            {
                f"{_HUB}/full/train-00000-of-00001.parquet": (
                    "09d125ca31edacb7800be8c67c45abff618faf0214ff551291817d06bdb914ae"
                )
            },
        ),
        File("validation", {f"{_HUB}/full/validation-00000-of-00001.parquet": ""}),
        File("test", {f"{_HUB}/full/test-00000-of-00001.parquet": ""}),
    ),
)

_LISTS = ("test_list", "challenge_test_list", "test_imports")


def example(row: Mapping[str, Any]) -> Example:
    asked, code = text(row, "text", "prompt"), text(row, "code")
    lists = {name: texts(row[name], name) for name in _LISTS if row.get(name) is not None}
    tests = lists.get("test_list")
    if not tests:
        raise DataError("field test_list: missing or empty; without tests an answer cannot be graded")
    known = kept(row, "test_setup_code", "source_file")
    solution = python(code, "code")
    checks = [python(test, "test_list") for test in tests]
    setup = "\n".join([*lists.get("test_imports", ()), known.get("test_setup_code", "")]).strip()
    entry_point = _entry_point(row, solution, checks)
    given = _given(setup, checks, entry_point, code, solution)
    test = _check(entry_point, given, tests)
    python(test, "test_list")
    shown_test = "\n".join([*given, tests[0].strip()])
    problem = (
        f"{asked.strip()}\n\nThe function is called {entry_point}. Your code should pass this test:\n\n{shown_test}"
    )
    return Example(
        id=identify("mbpp", problem),
        source="mbpp",
        problem_type="code",
        problem=problem,
        ground_truth=code,
        extra={
            "entry_point": entry_point,
            "test": test,
            "task_id": whole(row.get("task_id"), "task_id"),
            "text": asked,
            **lists,
            **known,
        },
    )


def _entry_point(row: Mapping[str, Any], solution: ast.Module, checks: Sequence[ast.Module]) -> str:
    """The function that the solution defines and the tests call."""
    called = [name for check in checks for name in _called(check)]
    if row.get("entry_point") is not None:
        named = text(row, "entry_point")
        if named not in called:
            raise DataError(f"field entry_point: holds {shown(named)}, which the tests do not call")
        return named
    defined = {node.name for node in solution.body if isinstance(node, ast.FunctionDef)}
    found = next((name for name in called if name in defined), None)
    if found is None:
        raise DataError(
            f"field test_list: calls {', '.join(sorted(set(called))) or 'nothing'}; "
            f"the code defines {', '.join(sorted(defined)) or 'no function'}"
        )
    return found


def _called(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def _given(setup: str, checks: Sequence[ast.Module], entry_point: str, code: str, solution: ast.Module) -> list[str]:
    """What the tests need beside the function: their own setup, and what it and they use of the solution."""
    parts = [python(setup, "test_setup_code"), *checks]
    needed = _free(ast.Module([node for part in parts for node in part.body], [])) - {entry_point}
    found: dict[int, str] = {}
    while needed:
        needed.remove(name := min(needed))
        node = next((node for node in solution.body if {name, "*"} & _bound(node)), None)
        if node is None:
            raise DataError(f"field test_list: uses {name}, which neither the code nor the tests' setup defines")
        if node.lineno not in found:
            found[node.lineno] = ast.get_source_segment(code, node) or ""
            needed |= _free(node) - {entry_point}
    return [part for part in [*(found[line] for line in sorted(found)), setup] if part]


def _free(tree: ast.AST) -> set[str]:
    """Names that are used and neither bound in the tree nor built in."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    bound = {name for node in ast.walk(tree) for name in _bound(node)}
    return used - bound - {node.id for node in names if not isinstance(node.ctx, ast.Load)} - set(dir(builtins))


def _bound(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
            return {name}
        case _:
            return set()


def _check(entry_point: str, given: Sequence[str], tests: Sequence[str]) -> str:
    """The assertions in HumanEval's way."""
    body = "\n".join(["def check(candidate):", f"{entry_point} = candidate", *(test.strip() for test in tests)])
    return "\n".join([*given, body.replace("\n", "\n    ") + "\n"])


def original(example: Example) -> Row:
    extra = example.extra
    names = ("task_id", "source_file", "test_setup_code", *_LISTS)
    asked = "prompt" if "test_imports" in extra else "text"
    return {asked: extra["text"], "code": example.ground_truth} | {name: extra[name] for name in names if name in extra}
