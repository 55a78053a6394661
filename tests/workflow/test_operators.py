"""The operators, called on the host with a scripted client, and the sandbox for code."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import ProviderError
from gradeflow.llm import ScriptedClient
from gradeflow.prompt import Message
from gradeflow.sandbox import Sandbox
from gradeflow.types import Event
from gradeflow.workflow.operators import OPERATORS, Refused, Tools, Trace, describe, unfence

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml")
Replies = Sequence[str | Exception] | Callable[[Sequence[Message]], str]


def call(name: str, replies: Replies, **arguments: Any) -> tuple[dict[str, str], tuple[Event, ...]]:
    async def serve() -> tuple[dict[str, str], tuple[Event, ...]]:
        trace, sandbox = Trace(), Sandbox(SETTINGS.sandbox)
        try:
            tools = Tools(ScriptedClient(replies), sandbox, trace)
            return await OPERATORS[name].serve(tools, **arguments), trace.events
        finally:
            await sandbox.close()

    return asyncio.run(serve())


def asked(event: Event) -> str:
    return str(event.inputs["messages"][0]["content"])


def test_the_policy_reads_one_short_line_per_operator() -> None:
    assert describe(["Programmer", "ScEnsemble"]) == (
        'self.programmer(problem, analysis) -> {"code", "output"}\nself.sc_ensemble(solutions, problem) -> {"response"}'
    )


def test_every_operator_that_settings_may_name_is_there() -> None:
    assert set(params.Operator.__args__) == set(OPERATORS)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "attribute", "parameters", "returns"),
    [
        ("Custom", "custom", ("input", "instruction"), ("response",)),
        ("AnswerGenerate", "answer_generate", ("input",), ("thought", "answer")),
        (
            "CustomCodeGenerate",
            "custom_code_generate",
            ("problem", "entry_point", "instruction"),
            ("response",),
        ),
        ("Programmer", "programmer", ("problem", "analysis"), ("code", "output")),
        ("ScEnsemble", "sc_ensemble", ("solutions", "problem"), ("response",)),
    ],
)
def test_operators_have_the_keys_of_aflow(
    name: str, attribute: str, parameters: tuple[str, ...], returns: tuple[str, ...]
) -> None:
    operator = OPERATORS[name]
    assert (operator.attribute, operator.parameters, operator.returns) == (attribute, parameters, returns)


def test_custom_hands_over_the_reply() -> None:
    answer, (event,) = call("Custom", ["Paris"], input="Capital of France?", instruction="Be {brief}.")
    assert answer == {"response": "Paris"}
    assert asked(event) == "Be {brief}.\n\nCapital of France?"


@pytest.mark.parametrize(
    ("reply", "thought", "answer"),
    [
        ("<thought>2 and 2</thought><answer>\n4 </answer>", "2 and 2", "4"),
        ("<answer>4", "", "4"),
        (" It is 4. ", "", "It is 4."),
    ],
)
def test_answer_generate_reads_tags_and_else_takes_the_whole_text(reply: str, thought: str, answer: str) -> None:
    assert call("AnswerGenerate", [reply], input="2+2?")[0] == {"thought": thought, "answer": answer}


def test_custom_code_generate_takes_the_fence_off() -> None:
    reply = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\n"
    answer, _ = call("CustomCodeGenerate", [reply], problem="Add.", entry_point="add", instruction="Solve.")
    assert answer == {"response": "def add(a, b):\n    return a + b"}


def test_a_text_without_a_fence_is_left_alone() -> None:
    assert unfence(" x = '``` no fence'\n") == "x = '``` no fence'"


@pytest.mark.parametrize(
    ("expression", "output"),
    [
        ("6 * 7", "42"),
        ("84 / 2", "42"),
        ("1 / 4", "0.25"),
        ("'a' * 2", "aa"),
        ("[1, 2]", "[1, 2]"),
        ("0", "0"),
    ],
)
def test_programmer_gives_what_solve_returns_as_text(expression: str, output: str) -> None:
    code = f"def solve():\n    return {expression}"
    assert call("Programmer", [code], problem="?")[0] == {"code": code, "output": output}


def test_programmer_feeds_the_error_back_and_tries_again() -> None:
    good = "def solve():\n    return 7"
    replies = ["def solve():\n    return 1 / 0", "def solve():\n    pass", f"```python\n{good}\n```"]
    answer, events = call("Programmer", replies, problem="What is 7?")
    assert answer == {"code": good, "output": "7"}
    assert [event.kind for event in events] == ["chat", "sandbox"] * 3
    first, second, third = (asked(event) for event in events if event.kind == "chat")
    assert second == f"{first}\n\nThe last code failed:\nZeroDivisionError: line 2: division by zero"
    assert third == f"{first}\n\nThe last code failed:\nsolve() returned None"


def test_programmer_gives_an_empty_output_after_three_failures() -> None:
    replies = ["not code at all", "def other(): ...", "import sys\nsys.exit()"]
    answer, events = call("Programmer", replies, problem="?")
    assert answer == {"code": replies[-1], "output": ""}
    assert len(events) == 6


@pytest.mark.parametrize(
    ("reply", "chosen"),
    [
        ("<solution_letter>B</solution_letter>", "7"),
        ("<solution_letter> c. </solution_letter>", "8"),
        ("B", "7"),
        ("<solution_letter>Z</solution_letter>", "8"),
        ("They are all good.", "8"),
    ],
)
def test_sc_ensemble_takes_the_letter_and_else_the_most_frequent(reply: str, chosen: str) -> None:
    answer, (event,) = call("ScEnsemble", [reply], solutions=["6", 7, "8", "8"], problem="?")
    assert answer == {"response": chosen}
    assert "A: 6\nB: 7\nC: 8\nD: 8" in asked(event)


@pytest.mark.parametrize("solutions", [[], "A", ["x"] * 27])
def test_sc_ensemble_refuses_what_it_cannot_letter(solutions: Any) -> None:
    with pytest.raises(Refused, match="1 to 26"):
        call("ScEnsemble", ["A"], solutions=solutions, problem="?")


@pytest.mark.parametrize("name", ["Custom", "AnswerGenerate", "CustomCodeGenerate", "Programmer", "ScEnsemble"])
def test_a_provider_that_breaks_is_a_fault(name: str) -> None:
    arguments = {parameter: ["x"] if parameter == "solutions" else "x" for parameter in OPERATORS[name].parameters}
    with pytest.raises(ProviderError):
        call(name, [ProviderError("down", cause="unreachable")], **arguments)


def test_only_chat_events_carry_tokens_so_that_they_add_up() -> None:
    _, events = call("Programmer", ["def solve():\n    return 1"], problem="?")
    chat, ran = events
    assert chat.prompt_tokens > 0
    assert chat.completion_tokens > 0
    assert (ran.prompt_tokens, ran.completion_tokens, ran.cost) == (0, 0, 0.0)
    assert ran.outputs["value"] == "1"
