"""Runs a workflow in this process with operators that answer from a seed: what the program really does, quickly."""

import ast
import asyncio
import builtins
import gc
import random
import types
import warnings
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from gradeflow.workflow.operators import OPERATORS
from gradeflow.workflow.program import ALLOWED_IMPORTS

REPLIES = ("", "42", "yes", "The answer is 7.", "[1, 2]", "one. two. three")
MOST_CALLS = 60


class StdinError(Exception): ...


class ArgumentsError(TypeError): ...


class NoStdin:
    def __getattr__(self, name: str) -> Any:
        raise StdinError


class Given:
    """What the workflow finds as `self.llm`."""

    def get_usage_summary(self) -> dict[str, float]:
        return {"total_cost": 0.5, "total_input_tokens": 1, "total_output_tokens": 1, "call_count": 1}


class Base: ...


@dataclass(frozen=True)
class Outcome:
    """What a run returned, or the class of failure and what was raised."""

    returned: object = None
    failure: str | None = None
    said: str = ""


def run(source: str, seed: int) -> Outcome:
    """One run; the seed says what the operators answer, whether they raise, and what the problem is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call = _call(source, random.Random(seed))
            returned = asyncio.run(call) if "asyncio" in source else _driven(call)
        except SyntaxError as error:
            return Outcome(failure="syntax", said=str(error))
        except Exception as error:  # noqa: BLE001 - it is what is asked
            return Outcome(failure=_class_of(error, source), said=f"{type(error).__name__}: {error}")
        gc.collect(0)
    if any("never awaited" in str(one.message) for one in caught):
        return Outcome(failure="await", said="never awaited")
    pair = isinstance(returned, tuple) and len(returned) == 2
    if not pair or not isinstance(returned[0], str | int | float) or not isinstance(returned[1], int | float):
        return Outcome(failure="await" if "coroutine" in str(returned) else "contract", said=str(returned))
    return Outcome(returned=returned)


def _driven(call: Coroutine[Any, Any, Any]) -> Any:
    """Without an event loop, which costs a millisecond."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it waits for something")


def _class_of(error: Exception, source: str) -> str:
    match error:
        case StdinError() | EOFError():
            return "stdin"
        case ArgumentsError():
            return "arguments"
        case NameError():
            return "unbound"
        case ImportError():
            return "import"
        case AttributeError(name=name, obj=owner):
            if isinstance(owner, Base) and f"self.{name}(" in source:
                return "operator"
            if isinstance(owner, types.ModuleType) and owner.__name__.endswith("template.operator"):
                return "operator"
    if "coroutine" in str(error):
        return "await"
    return "attribute" if isinstance(error, AttributeError) else "runtime"


async def _call(source: str, chance: random.Random) -> Any:
    calls = 0

    def operator(name: str) -> type:
        table = OPERATORS[name]

        async def call(_: Any, *values: Any, **named: Any) -> dict[str, str]:
            nonlocal calls
            calls += 1
            given = [*table.parameters[: len(values)], *named]
            if len(values) > len(table.parameters) or table.unfit(given):
                raise ArgumentsError(table.unfit(given) or "too many")
            for value in (*values, *named.values()):
                if "coroutine" in str(value):
                    raise TypeError("coroutine is not serializable")
            if calls > MOST_CALLS:
                raise RuntimeError("too many calls")
            if chance.random() < 0.1:
                raise RuntimeError("refused")
            return {key: chance.choice(REPLIES) for key in table.returns}

        return type(name, (), {"__init__": lambda *_: None, "__call__": call})

    operators = {name: operator(name) for name in OPERATORS}

    def bring(name: str, scope: Any = None, local: Any = None, parts: Any = (), level: int = 0) -> Any:
        if name.partition(".")[0] in ALLOWED_IMPORTS or name == "__future__":
            return builtins.__import__(name, scope, local, parts, level)
        if name == "sys":
            return types.SimpleNamespace(stdin=NoStdin())
        if not name.startswith(("workspace.", "scripts.")):
            raise ImportError(name)
        leaf = types.ModuleType(name)
        vars(leaf).update(create_llm_instance=lambda _: Given(), DatasetType=str)
        if name.endswith("operator"):
            vars(leaf).clear()
            vars(leaf).update(__name__=name, **operators)
        elif name.endswith("prompt"):
            vars(leaf).clear()
            vars(leaf).update(__name__=name)
        if parts:
            return leaf
        for part in reversed(name.split(".")[1:]):
            outer = types.ModuleType(part)
            setattr(outer, part, leaf)
            leaf = outer
        return leaf

    def no_input(*_: Any) -> str:
        raise StdinError

    scope = {
        "__name__": "workflow",
        "__builtins__": {**vars(builtins), "__import__": bring, "input": no_input, "print": lambda *_: None},
    }
    tree = ast.parse(source)
    problem, entry_point = chance.choice(("2 + 2?", "A longer question. " * 4)), chance.choice(("", "add"))
    if not any(isinstance(part, ast.ClassDef) and part.name == "Workflow" for part in tree.body):
        method = ast.parse("async def __call__(self, problem, entry_point): pass")
        method.body[0].body = tree.body or method.body[0].body  # type: ignore[attr-defined]
        exec(compile(method, "workflow", "exec"), scope)
        members = {table.attribute: operators[name]() for name, table in OPERATORS.items()}
        workflow = type("Workflow", (Base,), {**members, "llm": Given(), "__call__": scope["__call__"]})()
    else:
        exec(compile(tree, "workflow", "exec"), scope)
        written: Any = scope["Workflow"]
        workflow = type("Workflow", (written, Base), {})("workflow", {}, "math")
    takes = workflow.__call__.__code__.co_argcount - 1
    return await workflow(*(problem, entry_point)[:takes])
