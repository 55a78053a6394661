"""Whole runs: a completion, an example, a scripted executor and the sandbox."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import Fault, ProviderError, SandboxError
from gradeflow.llm import ChatClient, Reply, ScriptedClient
from gradeflow.prompt import Message
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.types import Example
from gradeflow.workflow.operators import OPERATORS
from gradeflow.workflow.run import WorkflowRun, run_workflow

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml")
EXAMPLE = Example("1", "word_problems", "math", "What is 6 times 7?", "42")
COST = 'self.llm.get_usage_summary()["total_cost"]'

GRAPH = """\
from typing import Literal
import workspace.math.workflows.template.operator as operator
from scripts.async_llm import create_llm_instance
from scripts.evaluator import DatasetType


class Workflow:
    def __init__(
        self,
        name: str,
        llm_config,
        dataset: DatasetType,
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.llm = create_llm_instance(llm_config)
        self.custom = operator.Custom(self.llm)
        self.sc_ensemble = operator.ScEnsemble(self.llm)

    async def __call__(self, problem: str):
        solutions = []
        for _ in range(3):
            solution = await self.custom(input=problem, instruction="Answer briefly.")
            solutions.append(solution["response"])
        best = await self.sc_ensemble(solutions=solutions, problem=problem)
        return best["response"], self.llm.get_usage_summary()["total_cost"]
"""


class PricedClient:
    """Answers with the number of the call, each at one dollar."""

    model = "priced"

    def __init__(self) -> None:
        self.calls = 0

    async def chat(self, messages: Sequence[Message], **_: Any) -> Reply:
        self.calls += 1
        text = f"answer {self.calls}"
        await asyncio.sleep(0)
        return Reply(text, 10, 5, "stop", self.model, 0.0, 1.0)

    async def close(self) -> None: ...


class BrokenSandbox(Sandbox):
    async def run(self, code: str, **_: Any) -> Execution:
        raise SandboxError("no sandbox here", cause="start")


def go(
    completion: str,
    replies: ChatClient | Sequence[str | Exception] | Callable[[Sequence[Message]], str] = (),
    example: Example = EXAMPLE,
    sandbox_class: type[Sandbox] = Sandbox,
    **settings: Any,
) -> WorkflowRun:
    async def run() -> WorkflowRun:
        client = replies if hasattr(replies, "chat") else ScriptedClient(replies)
        sandbox = sandbox_class(SETTINGS.sandbox)
        try:
            chosen = SETTINGS.workflow.model_copy(update=settings)
            return await run_workflow(completion, example, client, sandbox, chosen)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def test_a_body_runs_and_answers() -> None:
    done = go(
        f'result = await self.programmer(problem=problem)\nreturn result["output"], {COST}',
        ["def solve():\n    return 42"],
    )
    assert (done.answer, done.failure, done.valid, done.operators) == ("42", None, True, ("Programmer",))


def test_a_graph_in_aflows_style_runs_unchanged() -> None:
    done = go(GRAPH, ["41", "42", "42", "<solution_letter>B</solution_letter>"])
    assert (done.answer, done.failure, done.reason) == ("42", None, "")
    assert done.operators == ("Custom", "Custom", "Custom", "ScEnsemble")
    assert done.valid


@pytest.mark.parametrize(
    "imported",
    [
        "from workspace.math.workflows.template import operator",
        "import workspace.math.workflows.template.operator as operator",
        "import workspace.m.workflows.template.operator\noperator = workspace.m.workflows.template.operator",
    ],
)
def test_the_operator_module_is_found_however_it_is_imported(imported: str) -> None:
    as_written = GRAPH.splitlines()[1]
    done = go(GRAPH.replace(as_written, imported), ["1", "2", "3", "C"])
    assert (done.answer, done.reason) == ("3", "")


def test_a_class_may_take_the_entry_point_and_do_without_a_constructor() -> None:
    source = "class Workflow:\n    async def __call__(self, problem, entry_point):\n        return entry_point, 0"
    assert go(source, example=replace(EXAMPLE, extra={"entry_point": "add"})).answer == "add"


@pytest.mark.parametrize(
    "imported",
    [
        "import workspace.math.workflows.round_1.prompt as prompt_custom",
        "from workspace.math.workflows.round_1 import prompt as prompt_custom",
    ],
)
def test_the_prompts_of_a_round_are_a_module_without_any(imported: str) -> None:
    program = f"{imported}\n{GRAPH}".replace('"Answer briefly."', "str(vars(prompt_custom))")
    done = go(program, ["41", "42", "42", "<solution_letter>B</solution_letter>"])
    assert (done.answer, done.valid) == ("42", True)
    instructions = [event.inputs["instruction"] for event in done.events if event.name == "Custom"]
    assert all("workspace.math.workflows.round_1.prompt" in told for told in instructions)


def test_a_class_may_take_the_public_tests_and_nothing_else() -> None:
    source = "class Workflow:\n    async def __call__(self, problem, entry_point, test):\n        return test, 0"
    hidden = {"entry_point": "add", "test": "def check(candidate):\n    assert candidate(5, 6) == 11"}
    shown = 'def add(a, b):\n    """Add.\n\n    >>> add(1, 2)\n    3\n    """\n'
    assert go(source, example=Example("1", "functions", "code", shown, "", hidden)).answer == "assert add(1, 2) == 3"
    assert go(source, example=Example("1", "functions", "code", "Write add.", "", hidden)).answer == ""


def test_operators_take_arguments_by_position_too() -> None:
    done = go(f'r = await self.custom(problem, "Say it.")\nreturn r["response"], {COST}', lambda m: m[0]["content"])
    assert done.answer == f"Say it.\n\n{EXAMPLE.problem}"


@pytest.mark.parametrize(
    ("value", "answer"), [("42", "42"), ("1.5", "1.5"), ("'x'", "x"), ("True", "True"), ("''", "")]
)
def test_the_answer_becomes_text(value: str, answer: str) -> None:
    assert go(f"return {value}, 0").answer == answer


def test_a_fraction_is_a_number() -> None:
    assert go("from fractions import Fraction\nreturn Fraction(1, 2), 0").answer == "1/2"


@pytest.mark.parametrize(
    ("completion", "failure", "said"),
    [
        ("return (", "syntax", "never closed"),
        ("import os\nreturn os.environ, 0", "import", "os"),
        ("r = await self.magic(x=1)\nreturn r, 0", "operator", "magic"),
        ("r = await self.custom(x=1)\nreturn r, 0", "arguments", "not x"),
        ("pass", "contract", "return"),
        ("if problem == '':\n    return 1, 0", "contract", "NoneType"),
        ("pair = (1, 2, 3)\nreturn pair", "contract", "(int, int, int)"),
        ("return {'a': 1}, 0", "contract", "(dict, int)"),
        ("return None, 0", "contract", "(NoneType, int)"),
        ("return 'x', 'free'", "contract", "(str, str)"),
        ("answer = {'a': 'x'}\nreturn answer", "contract", "no pair"),
        ("raise SystemExit\nreturn 'x', 0", "contract", "nothing"),
        ("if problem == '':\n    x = max(problem)\nreturn x + '', 0", "unbound", "x"),
        ("return undefined, 0", "unbound", "undefined"),
        ("x = 1\nreturn x / 0, 0", "runtime", "ZeroDivisionError: line 2: division by zero"),
        ("return self.nothing, 0", "attribute", "nothing"),
        ("return input(), 0", "stdin", "input"),
        ("return open('x').read(), 0", "name", "open"),
        ("keys = {'inpt': 'x'}\nr = await self.answer_generate(**keys)\nreturn r, 0", "runtime", "not inpt"),
        ("r = await self.sc_ensemble(solutions=[], problem='')\nreturn r, 0", "runtime", "1 to 26"),
    ],
)
def test_each_failure_has_its_class(completion: str, failure: str, said: str) -> None:
    done = go(completion, lambda _: "x")
    assert (done.answer, done.failure, done.valid) == (None, failure, False)
    assert said in done.reason


@pytest.mark.parametrize(
    ("completion", "mend"),
    [
        ("r = self.custom(input='', instruction='')\nreturn r['response'], 0", "missing_await"),
        ("async def ask():\n    return 'x'\nr = ask()\nreturn r.strip(), 0", "missing_await"),
        (
            "r = 'x'\nif problem == '':\n    y = 'y'\nif problem == '':\n    r = y\nelse:\n    r = r\nreturn r",
            "missing_cost",
        ),
    ],
)
def test_a_mended_program_answers_and_is_not_valid(completion: str, mend: str) -> None:
    done = go(completion, lambda _: "x")
    assert (done.answer, done.failure, done.valid) == ("x", None, False)
    assert done.events[0].outputs["mends"] == (mend,)


def test_a_program_that_never_ends_is_a_timeout() -> None:
    done = go("while True:\n    pass\nreturn 1, 0", wall_s=0.5)
    assert (done.answer, done.failure) == (None, "timeout")


def test_a_program_that_eats_memory_hits_a_limit() -> None:
    done = go("return len(bytearray(10**12)), 0")
    assert (done.answer, done.failure) == (None, "limit")
    assert "memory" in done.reason


def test_a_budget_that_is_spent_is_a_failure_even_when_the_program_goes_on() -> None:
    source = """\
found = ""
for _ in range(5):
    try:
        found = (await self.answer_generate(input=problem))["answer"]
    except Exception:
        pass
return found, 0"""
    done = go(source, ["a"] * 5, max_calls=3)
    assert (done.answer, done.failure) == (None, "budget")
    assert done.operators == ("AnswerGenerate",) * 3
    assert go(source, ["a"] * 5, max_calls=5).answer == "a"


@pytest.mark.parametrize(
    ("limit", "calls", "reason"),
    [
        ({"max_tokens": 44}, 3, "more than 44 tokens"),
        ({"max_tokens": 45}, 4, "more than 45 tokens"),
        ({"max_cost": 1.5}, 2, "more than 1.5 USD"),
        ({"max_cost": 4.0}, 5, "more than 4 USD"),
        ({"max_cost": 1.0, "max_tokens": 20}, 2, "more than 20 tokens"),
    ],
)
def test_tokens_and_cost_are_budgets_too(limit: dict[str, float], calls: int, reason: str) -> None:
    source = """\
for _ in range(9):
    try:
        await self.answer_generate(input=problem)
    except Exception:
        pass
return "done", 0"""
    client = PricedClient()
    done = go(source, client, **limit)
    assert (done.answer, done.failure, done.reason) == (None, "budget", reason)
    assert client.calls == calls
    assert done.cost == calls


def test_a_budget_holds_inside_an_operator() -> None:
    source = "r = await self.md_ensemble(solutions=['1', '2'], problem=problem)\nreturn r['solution'], 0"
    everything = {"operators": list(OPERATORS), "max_cost": 2.0}
    done = go(source, PricedClient(), **everything)
    assert (done.failure, done.reason) == ("budget", "more than 2 USD")
    source = "r = await self.programmer(problem=problem)\nreturn r['output'], 0"
    done = go(source, client := PricedClient(), **everything | {"max_cost": 1.5})
    assert (done.failure, client.calls) == ("budget", 2)


def test_a_budget_that_is_just_used_up_is_kept() -> None:
    source = f'r = await self.custom(input="", instruction="")\nreturn r["response"], {COST}'
    assert go(source, PricedClient(), max_calls=1, max_tokens=15, max_cost=1.0).answer == "answer 1"


def test_mends_are_recorded_and_a_mended_program_is_not_valid() -> None:
    done = go("r = await self.AnswerGenerate(input=problem)\nreturn r['answer']", ["42"])
    assert (done.answer, done.failure, done.valid) == ("42", None, False)
    assert done.events[0].outputs["mends"] == ("operator_case", "missing_cost")


def test_operators_may_be_awaited_together() -> None:
    all_four = asyncio.Barrier(4)

    class Together(PricedClient):
        async def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
            async with asyncio.timeout(10):
                await all_four.wait()
            return await super().chat(messages, **options)

    source = f"""\
import asyncio
results = await asyncio.gather(*(self.custom(input=str(n), instruction="") for n in range(4)))
return " ".join(sorted(result["response"] for result in results)), {COST}"""
    done = go(source, Together())
    assert done.answer == "answer 1 answer 2 answer 3 answer 4"
    assert done.cost == 4.0


def test_the_program_sees_its_own_cost() -> None:
    source = f"""\
before = {COST}
for _ in range(2):
    await self.custom(input="", instruction="")
usage = self.llm.get_usage_summary()
read = usage["total_input_tokens"]
return f"{{before}} {{usage['total_cost']}} {{usage['call_count']}} {{read}}", {COST}"""
    done = go(source, PricedClient())
    assert done.answer == "0.0 2.0 2 20"
    assert done.cost == 2.0


def test_two_workflows_at_once_have_costs_of_their_own() -> None:
    async def run() -> list[WorkflowRun]:
        sandbox, client = Sandbox(SETTINGS.sandbox), PricedClient()
        body = f"for _ in range({{}}):\n    await self.answer_generate(input='')\nreturn str({COST}), {COST}"
        try:
            runs = (run_workflow(body.format(n), EXAMPLE, client, sandbox, SETTINGS.workflow) for n in (1, 3))
            return list(await asyncio.gather(*runs))
        finally:
            await sandbox.close()

    one, three = asyncio.run(run())
    assert (one.answer, one.cost, three.answer, three.cost) == ("1.0", 1.0, "3.0", 3.0)


class DoublingClient(PricedClient):
    """The n-th call costs 2**n dollars, so that a sum says which calls are in it; the first take longest."""

    async def chat(self, messages: Sequence[Message], **_: Any) -> Reply:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(0.2 / number)
        return Reply(f"{number}", number, 1, "stop", self.model, 0.0, 2.0**number)


def test_costs_add_up_call_by_call_under_concurrency() -> None:
    body = f"""\
import asyncio, json
results = await asyncio.gather(*(self.custom(input=str(n), instruction="") for n in range(COUNT)))
return json.dumps([[int(result["response"]) for result in results], self.llm.get_usage_summary()]), {COST}"""

    async def run() -> list[WorkflowRun]:
        sandbox, client = Sandbox(SETTINGS.sandbox), DoublingClient()
        try:
            bodies = [body.replace("COUNT", str(count)) for count in (2, 3, 4)]
            runs = (run_workflow(each, EXAMPLE, client, sandbox, SETTINGS.workflow) for each in bodies)
            return list(await asyncio.gather(*runs))
        finally:
            await sandbox.close()

    served = set()
    for done, count in zip(asyncio.run(run()), (2, 3, 4), strict=True):
        own, usage = json.loads(done.answer or "")
        served |= set(own)
        assert len(own) == usage["call_count"] == count
        assert usage["total_cost"] == done.cost == sum(2.0**call for call in own)
        assert usage["total_input_tokens"] == sum(own)
    assert served == set(range(1, 10))


def test_more_workflows_than_the_sandbox_runs_at_once_can_all_call_programmer() -> None:
    async def run() -> list[WorkflowRun]:
        sandbox = Sandbox(SETTINGS.sandbox.model_copy(update={"parallel": 2}))
        client = ScriptedClient(lambda _: "def solve():\n    return 1")
        body = f"r = await self.programmer(problem=problem)\nreturn r['output'], {COST}"
        try:
            runs = (run_workflow(body, EXAMPLE, client, sandbox, SETTINGS.workflow) for _ in range(6))
            return list(await asyncio.wait_for(asyncio.gather(*runs), 15))
        finally:
            await sandbox.close()

    assert [done.answer for done in asyncio.run(run())] == ["1"] * 6


def test_what_a_grader_needs_is_out_of_the_programs_reach() -> None:
    source = """\
import json
def walk(value, depth=0):
    if depth > 6:
        return
    if isinstance(value, dict):
        for key, part in value.items():
            yield str(key)
            yield from walk(part, depth + 1)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from walk(part, depth + 1)
    else:
        yield str(value)
harness = getattr(json.codecs.builtins, "__imp" + "ort__")("harness")
everything = [dict(harness.inputs), globals(), vars(self), problem, entry_point]
return " ".join(walk(everything)), 0"""
    hidden = {"test": "assert add(1, 2) == 1234567", "entry_point": "add", "solution": "7654321"}
    done = go(source, example=Example("1", "functions", "code", "Write add.", "5551212", hidden))
    assert done.failure is None, done.reason
    assert "Write add." in (done.answer or "")
    assert not any(secret in (done.answer or "") for secret in ("1234567", "7654321", "5551212"))


SPY = """\
import json
harness = getattr(json.codecs.builtins, "__imp" + "ort__")("harness")
seen = json.dumps(dict(harness.inputs), default=str) + repr(globals()) + repr(vars(self)) + problem + entry_point
said = []
for solution in ("def add(a, b): return 0", "def add(", "import sys; print(sys._getframe(3).f_locals)"):
    tested = await self.test(problem=problem, solution=solution, entry_point=entry_point, test_loop=1)
    said.append(tested["solution"])
for name in ("test", "tests", "extra", "example", "check"):
    try:
        said.append(await harness.acall(name))
    except Exception as error:
        said.append(str(error))
r = await self.custom(input=seen, instruction=str(said))
return r["response"], 0"""


@pytest.mark.parametrize(
    "problem", ["Write add.", 'def add(a, b):\n    """Add.\n\n    >>> add(1, 2)\n    3\n    """\n']
)
def test_no_word_of_the_hidden_tests_is_in_any_event(problem: str) -> None:
    hidden = {"test": "def check(candidate):\n    assert candidate(81, 19) == 1234567", "entry_point": "add"}
    example = Example("1", "functions", "code", problem, "    return a + b  # 5551212", hidden)
    done = go(SPY, lambda asked: asked[0]["content"], example, operators=list(OPERATORS))
    assert done.failure is None, done.reason
    told = repr(done)
    assert ("add(1, 2) gave 0, not 3" in told) is (">>>" in problem)
    assert not any(secret in told for secret in ("1234567", "(81, 19)", "check(candidate)", "5551212"))


@pytest.mark.parametrize("operator", ["custom(input='', instruction='')", "programmer(problem='')"])
def test_a_provider_fault_is_raised_whatever_the_program_catches(operator: str) -> None:
    source = f"try:\n    await self.{operator}\nexcept BaseException:\n    pass\nreturn 'x', 0"
    with pytest.raises(ProviderError, match="down") as caught:
        go(source, [ProviderError("down", cause="unreachable")])
    assert caught.value.cause == "unreachable"


def test_a_sandbox_fault_is_raised() -> None:
    with pytest.raises(SandboxError, match="no sandbox"):
        go("return 1, 0", sandbox_class=BrokenSandbox)


def test_a_sandbox_fault_inside_an_operator_is_raised() -> None:
    class BreaksWithin(Sandbox):
        async def run(self, code: str, **options: Any) -> Execution:
            if options.get("handler"):
                return await super().run(code, **options)
            raise SandboxError("broke", cause="start")

    with pytest.raises(SandboxError, match="broke"):
        go("r = await self.programmer(problem='')\nreturn r['output'], 0", ["x"], sandbox_class=BreaksWithin)


def test_a_defect_of_an_operator_is_a_fault_and_no_failure_of_the_policy() -> None:
    class Odd(PricedClient):
        async def chat(self, messages: Sequence[Message], **_: Any) -> Reply:
            raise KeyError("choices")

    with pytest.raises(Fault, match="operator Custom broke: KeyError") as caught:
        go("r = await self.custom(input='', instruction='')\nreturn r['response'], 0", Odd())
    assert caught.value.cause == "operator_crash"


def test_events_nest_below_the_workflow() -> None:
    done = go(f'r = await self.programmer(problem=problem)\nreturn r["output"], {COST}', ["def solve(): return 42"])
    assert [(event.kind, event.name, event.parent) for event in done.events] == [
        ("workflow", "workflow", None),
        ("operator", "Programmer", 0),
        ("chat", "scripted", 1),
        ("sandbox", "run", 1),
    ]
    assert done.events[0].outputs["answer"] == "42"
    assert done.events[1].inputs == {"problem": EXAMPLE.problem}
    assert done.events[1].outputs["output"] == "42"


def test_the_script_does_not_ask_for_an_event_loop_by_itself() -> None:
    """The harness starts one, at some 60 ms, for every job that names it."""
    shim = Path(run_workflow.__code__.co_filename).with_name("shim.py")
    assert "asyncio" not in shim.read_text(encoding="utf-8")


def test_a_refused_program_still_leaves_its_event() -> None:
    (event,) = go("return (").events
    assert (event.kind, event.outputs["failure"]) == ("workflow", "syntax")
