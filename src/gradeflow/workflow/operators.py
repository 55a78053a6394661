"""The operators that a workflow may await, as the host serves them, with AFlow's call and return keys.

A reply that cannot be used is the executor's own bad answer; a provider or a sandbox that breaks raises its
fault.
"""

import inspect
import re
import string
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from gradeflow import prompt
from gradeflow.llm import ChatClient
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.types import Event

PROGRAMMER_TRIES = 3
RETRY_TEMPERATURE = 0.7

_FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_SOLVE = """

import harness as _harness
_value = solve()
if _value is not None:
    _whole = isinstance(_value, float) and _value.is_integer()
    _harness.result(str(int(_value) if _whole else _value))
"""


class Refused(Exception):  # noqa: N818 - no fault of ours
    """A call that a workflow may not make; it meets the reason as an exception of its own."""


@dataclass(slots=True)
class Span:
    """What is filled in while an event lasts."""

    index: int
    outputs: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class Trace:
    """Events in the order in which they began. Only chat events carry tokens and cost: they add up."""

    def __init__(self) -> None:
        self._events: list[Event | None] = []

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for event in self._events if event is not None)

    def usage(self) -> dict[str, float]:
        """The summary that AFlow's `llm.get_usage_summary()` gives, for everything traced so far."""
        chats = [event for event in self.events if event.kind == "chat"]
        return {
            "total_input_tokens": sum(event.prompt_tokens for event in chats),
            "total_output_tokens": sum(event.completion_tokens for event in chats),
            "total_cost": sum(event.cost for event in chats),
            "call_count": len(chats),
        }

    @contextmanager
    def span(
        self,
        kind: Literal["workflow", "operator", "chat", "sandbox"],
        name: str,
        inputs: Mapping[str, Any],
        parent: int | None = None,
    ) -> Iterator[Span]:
        span = Span(len(self._events))
        self._events.append(None)
        started, clock = time.time(), time.perf_counter()
        try:
            yield span
        finally:
            self._events[span.index] = Event(
                kind,
                name,
                started,
                time.perf_counter() - clock,
                inputs,
                span.outputs,
                span.prompt_tokens,
                span.completion_tokens,
                span.cost,
                parent,
            )


@dataclass(frozen=True, slots=True)
class Tools:
    """What an operator works with; `parent` is the event of the call that it serves."""

    client: ChatClient
    sandbox: Sandbox
    trace: Trace
    parent: int | None = None

    async def ask(self, content: str, *, temperature: float | None = None, seed: int | None = None) -> str:
        messages = prompt.user(content)
        with self.trace.span("chat", self.client.model, {"messages": messages}, self.parent) as span:
            reply = await self.client.chat(messages, temperature=temperature, seed=seed)
            span.outputs = {"text": reply.text, "finish_reason": reply.finish_reason}
            span.prompt_tokens, span.completion_tokens = reply.prompt_tokens, reply.completion_tokens
            span.cost = reply.cost
        return reply.text

    async def execute(self, code: str) -> Execution:
        with self.trace.span("sandbox", "run", {"code": code}, self.parent) as span:
            execution = await self.sandbox.run(code)
            span.outputs = {"status": execution.status, "value": execution.value, "error": execution.error}
        return execution


async def custom(tools: Tools, input: str, instruction: str) -> dict[str, str]:  # noqa: A002 - AFlow's name
    content = prompt.load("custom").render(instruction=str(instruction), input=str(input))
    return {"response": await tools.ask(content)}


async def answer_generate(tools: Tools, input: str) -> dict[str, str]:  # noqa: A002 - AFlow's name
    text = await tools.ask(prompt.load("answer_generate").render(input=str(input)))
    answer = _tagged("answer", text)
    return {"thought": _tagged("thought", text) or "", "answer": text.strip() if answer is None else answer}


async def custom_code_generate(tools: Tools, problem: str, entry_point: str, instruction: str) -> dict[str, str]:
    content = prompt.load("custom_code_generate").render(
        instruction=str(instruction), problem=str(problem), entry_point=str(entry_point)
    )
    return {"response": unfence(await tools.ask(content))}


async def programmer(tools: Tools, problem: str, analysis: str = "None") -> dict[str, str]:
    asked = prompt.load("programmer").render(problem=str(problem), analysis=str(analysis))
    code, error = "", ""
    failed: set[str] = set()
    for attempt in range(PROGRAMMER_TRIES):
        if attempt == 0:
            reply = await tools.ask(asked)
        else:
            feedback = f"{asked}\n\nThe last code failed:\n{error}"
            reply = await tools.ask(feedback, temperature=RETRY_TEMPERATURE, seed=attempt)
        code = unfence(reply)
        if code in failed:  # it would fail again
            continue
        execution = await tools.execute(code + _SOLVE)
        if execution.status == "ok" and execution.value is not None:
            return {"code": code, "output": str(execution.value)}
        error = _what_went_wrong(execution)
        failed.add(code)
    return {"code": code, "output": ""}


async def sc_ensemble(tools: Tools, solutions: Sequence[str], problem: str) -> dict[str, str]:
    if not isinstance(solutions, list | tuple) or not 0 < len(solutions) <= len(string.ascii_uppercase):
        raise Refused("ScEnsemble: solutions is a list of 1 to 26 answers")
    texts = [str(solution) for solution in solutions]
    lettered = dict(zip(string.ascii_uppercase, texts, strict=False))
    listed = "\n".join(f"{letter}: {text}" for letter, text in lettered.items())
    reply = await tools.ask(prompt.load("sc_ensemble").render(problem=str(problem), solutions=listed))
    chosen = (_tagged("solution_letter", reply) or reply).strip(" \n.:()").upper()
    return {"response": lettered.get(chosen) or Counter(texts).most_common(1)[0][0]}


Serve = Callable[..., Awaitable[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    attribute: str
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    returns: tuple[str, ...]
    description: str
    serve: Serve

    def unfit(self, names: Sequence[str]) -> str:
        """Why a call that gives these parameters is wrong; empty when it is right."""
        if unknown := [name for name in names if name not in self.parameters]:
            return f"{self.name} takes {', '.join(self.parameters)}, not {', '.join(unknown)}"
        if missing := [name for name in self.required if name not in names]:
            return f"{self.name} lacks {', '.join(missing)}"
        if len(set(names)) < len(names):
            return f"{self.name} is given a parameter twice"
        return ""


def _operator(serve: Serve, returns: str, description: str) -> Operator:
    attribute = getattr(serve, "__name__", "")
    name = attribute.title().replace("_", "")
    _, *parameters = inspect.signature(serve).parameters.values()
    names = tuple(parameter.name for parameter in parameters)
    required = tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)
    return Operator(name, attribute, names, required, tuple(returns.split()), description, serve)


_TABLE = (
    _operator(custom, "response", "answers the input as instructed"),
    _operator(answer_generate, "thought answer", "thinks step by step, then answers"),
    _operator(custom_code_generate, "response", "writes a function as instructed"),
    _operator(programmer, "code output", "writes Python code, runs it, and gives its output"),
    _operator(sc_ensemble, "response", "picks the most consistent of several solutions"),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}


def describe(names: Iterable[str]) -> str:
    """One line per operator, as the policy reads it."""
    return "\n".join(_signature(OPERATORS[name]) for name in names)


def unfence(text: str) -> str:
    """The first fenced block, or the text itself where there is none."""
    block = _FENCE.search(text)
    return block[1].strip("\n") if block else text.strip()


def _signature(operator: Operator) -> str:
    keys = ", ".join(f'"{key}"' for key in operator.returns)
    return f"self.{operator.attribute}({', '.join(operator.parameters)}) -> {{{keys}}}"


def _tagged(tag: str, text: str) -> str | None:
    found = re.search(rf"<{tag}>(.*?)(?:</{tag}>|\Z)", text, re.DOTALL)
    return found[1].strip() if found else None


def _what_went_wrong(execution: Execution) -> str:
    if execution.status == "ok":
        return "solve() returned None"
    return f"{execution.error_type}: {execution.error}" if execution.error_type else execution.error
