"""The operators that a workflow may await, as the host serves them, with AFlow's call and return keys.

A reply without the tags that were asked for is taken as it is, an answer of the executor's like any other; a
provider or a sandbox that breaks raises its fault. The prompt of an operator is the text file of its name.
"""

import asyncio
import inspect
import random
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradeflow import digest, prompt
from gradeflow.errors import ProviderError
from gradeflow.llm import ChatClient
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.trace import Trace
from gradeflow.workflow import public_tests

PROGRAMMER_TRIES = 3
RETRY_TEMPERATURE = 0.7
VOTES = 5
MOST_REVISIONS = 10

_FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_SOLVE = """

import harness as _harness
_value = solve()
if _value is not None:
    _whole = isinstance(_value, float) and _value.is_integer()
    _harness.result(str(int(_value) if _whole else _value))
"""
# Its result says what is wrong with the solution; nothing, where nothing is.
_PUBLIC_TESTS = """
import harness

def run(sources, entry_point, tests):
    scope = {"__name__": "solution"}
    for source in sources:
        scope.pop(entry_point, None)
        exec(compile(source, "solution.py", "exec"), scope)
    if entry_point and not callable(scope.get(entry_point)):
        return f"it does not define {entry_point}"
    return "\\n".join(filter(None, (look(call, expected, scope) for call, expected in tests)))

def look(call, expected, scope):
    try:
        found = eval(call, scope)
        return "" if found == eval(expected) else f"{call} gave {repr(found)[:500]}, not {expected}"
    except Exception as error:
        return f"{call} raised {type(error).__name__}: {str(error)[:500]}"

harness.result(run(**harness.inputs))
"""


class Refused(Exception):  # noqa: N818 - no fault of ours
    """A call that a workflow may not make; it meets the reason as an exception of its own."""


@dataclass(slots=True)
class Budget:
    """What one workflow may take of the executor, 0 for no limit; `overspent` says of what it took more.

    What replies cost is known when they are there: those in flight come on top, and nothing is asked afterwards.
    """

    tokens: int = 0
    cost: float = 0.0
    overspent: str = ""

    def require(self) -> None:
        if self.overspent:
            raise Refused(self.overspent)

    def charge(self, usage: Mapping[str, float]) -> None:
        if 0 < self.tokens < usage["total_input_tokens"] + usage["total_output_tokens"]:
            self.overspend(f"more than {self.tokens} tokens")
        if 0 < self.cost < usage["total_cost"]:
            self.overspend(f"more than {self.cost:g} USD")
        self.require()

    def overspend(self, reason: str) -> None:
        self.overspent = self.overspent or reason


@dataclass(frozen=True, slots=True)
class Tools:
    """What an operator works with; `problem` is what was asked, whatever the workflow makes of it: its docstring has
    the public tests.
    """

    client: ChatClient
    sandbox: Sandbox
    trace: Trace
    problem: str = ""
    budget: Budget = field(default_factory=Budget)

    async def ask(self, content: str, *, temperature: float | None = None, seed: int | None = None) -> str:
        self.budget.require()
        try:
            reply = await self.trace.chat(self.client, prompt.user(content), temperature=temperature, seed=seed)
        except ProviderError as error:
            if error.cause == "too_long":  # the workflow made it so
                raise Refused(str(error)) from None
            raise
        self.budget.charge(self.trace.usage())
        return reply.text

    async def execute(self, code: str, inputs: Mapping[str, Any] | None = None) -> Execution:
        return await self.trace.run(self.sandbox, code, shown={"code": code, **(inputs or {})}, inputs=inputs)


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
    texts = _texts(solutions, "ScEnsemble")
    chosen = await _vote(tools, "sc_ensemble", texts, problem)
    return {"response": _most_frequent(texts) if chosen is None else chosen}


async def md_ensemble(tools: Tools, solutions: Sequence[str], problem: str) -> dict[str, str]:
    texts = _texts(solutions, "MdEnsemble")
    rng = random.Random(digest.of_json([texts, str(problem)]))
    orders = [rng.sample(texts, len(texts)) for _ in range(VOTES)]
    votes = await asyncio.gather(
        *(_vote(tools, "md_ensemble", order, problem, seed) for seed, order in enumerate(orders))
    )
    cast = [vote for vote in votes if vote is not None]
    return {"solution": _most_frequent(cast or texts)}


async def test(
    tools: Tools,
    problem: str,
    solution: str,
    entry_point: str,
    test_loop: int = 3,  # noqa: PT028 - AFlow's name
) -> dict[str, str | bool]:
    if not isinstance(test_loop, int) or not 0 <= test_loop <= MOST_REVISIONS:
        raise Refused(f"Test: test_loop is a whole number from 0 to {MOST_REVISIONS}")
    tried = str(solution)
    for revision in range(test_loop + 1):
        error = await _public_failure(tools, tried, str(entry_point))
        if not error:
            return {"result": True, "solution": tried}
        if revision < test_loop:
            asked = prompt.load("test").render(problem=str(problem), solution=tried, error=error)
            tried = unfence(await tools.ask(asked, temperature=RETRY_TEMPERATURE, seed=revision))
    return {"result": False, "solution": tried}


async def format(tools: Tools, problem: str, solution: str) -> dict[str, str]:  # noqa: A001 - AFlow's name
    asked = prompt.load("format").render(problem=str(problem), solution=str(solution))
    return {"solution": (await tools.ask(asked)).strip()}


async def review(tools: Tools, problem: str, solution: str) -> dict[str, str | bool]:
    """A reply without a verdict approves of nothing: its whole text is the feedback."""
    text = await tools.ask(prompt.load("review").render(problem=str(problem), solution=str(solution)))
    verdict, feedback = _tagged("review_result", text), _tagged("feedback", text)
    approved = (verdict or "").lower().startswith(("true", "yes"))
    return {"review_result": approved, "feedback": text.strip() if feedback is None else feedback}


async def revise(tools: Tools, problem: str, solution: str, feedback: str) -> dict[str, str]:
    asked = prompt.load("revise").render(problem=str(problem), solution=str(solution), feedback=str(feedback))
    return {"solution": (await tools.ask(asked)).strip()}


def _texts(solutions: Any, name: str) -> list[str]:
    if not isinstance(solutions, list | tuple) or not 0 < len(solutions) <= len(string.ascii_uppercase):
        raise Refused(f"{name}: solutions is a list of 1 to 26 answers")
    return [str(solution) for solution in solutions]


async def _vote(tools: Tools, name: str, texts: Sequence[str], problem: str, seed: int | None = None) -> str | None:
    """The text whose letter the executor names; None when it names none."""
    lettered = dict(zip(string.ascii_uppercase, texts, strict=False))
    listed = "\n".join(f"{letter}: {text}" for letter, text in lettered.items())
    reply = await tools.ask(prompt.load(name).render(problem=str(problem), solutions=listed), seed=seed)
    return lettered.get((_tagged("solution_letter", reply) or reply).strip(" \n.:()").upper())


def _most_frequent(texts: Sequence[str]) -> str:
    return Counter(texts).most_common(1)[0][0]


async def _public_failure(tools: Tools, solution: str, entry_point: str) -> str:
    """What is wrong with a solution by the public tests; empty when nothing is."""
    code = unfence(solution) if "```" in solution else solution.strip("\n")
    sources = [code]
    if public_tests.function(tools.problem, entry_point):
        continues = code[:1].isspace()
        sources = [f"{tools.problem.rstrip()}\n{code}"] if continues else [tools.problem, code]
    tests = [(test.call, test.expected) for test in public_tests.read(tools.problem, entry_point)]
    execution = await tools.execute(_PUBLIC_TESTS, {"sources": sources, "entry_point": entry_point, "tests": tests})
    if execution.status == "ok":
        return execution.value if isinstance(execution.value, str) else "it ended before its tests did"
    return _said(execution)


Serve = Callable[..., Awaitable[Mapping[str, str | bool]]]


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
    _operator(md_ensemble, "solution", f"picks the best of several solutions by {VOTES} votes over shuffled orders"),
    _operator(
        test,
        "result solution",
        "runs the examples of the problem's docstring, and revises a solution that fails them up to test_loop times;"
        " without examples it only looks whether the solution runs and defines entry_point",
    ),
    _operator(format, "solution", "reduces a solution to the short answer that the problem asks for"),
    _operator(review, "review_result feedback", "says whether a solution is right, and what is wrong with it"),
    _operator(revise, "solution", "mends a solution as feedback says"),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}


def describe(names: Iterable[str]) -> str:
    """One line per operator, as the policy reads it."""
    return "\n".join(_signature(OPERATORS[name]) for name in names)


def prompts(names: Iterable[str]) -> list[str]:
    """The names of the prompts by which these operators ask."""
    return [OPERATORS[name].attribute for name in names]


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
    return _said(execution)


def _said(execution: Execution) -> str:
    return f"{execution.error_type}: {execution.error}" if execution.error_type else execution.error
