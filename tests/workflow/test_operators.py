"""The operators, called on the host with a scripted client, and the sandbox for code."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params
from gradeflow.errors import ProviderError
from gradeflow.llm import ScriptedClient
from gradeflow.prompt import Message
from gradeflow.sandbox import Sandbox
from gradeflow.trace import Trace
from gradeflow.types import Event
from gradeflow.workflow.operators import OPERATORS, Refused, Tools, describe, unfence

SETTINGS = params.load(Path(__file__).parents[2] / "params.yaml")
Replies = Sequence[str | Exception] | Callable[[Sequence[Message]], str]


def call(
    name: str, replies: Replies, *, about: str = "", **arguments: Any
) -> tuple[Mapping[str, str | bool], tuple[Event, ...]]:
    """What an operator answers in a workflow whose example asks `about`, and what happened meanwhile."""

    async def serve() -> tuple[Mapping[str, str | bool], tuple[Event, ...]]:
        trace, sandbox = Trace(), Sandbox(SETTINGS.sandbox)
        try:
            tools = Tools(ScriptedClient(replies), sandbox, trace, problem=about)
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
        ("MdEnsemble", "md_ensemble", ("solutions", "problem"), ("solution",)),
        ("Test", "test", ("problem", "solution", "entry_point", "test_loop"), ("result", "solution")),
        ("Format", "format", ("problem", "solution"), ("solution",)),
        ("Review", "review", ("problem", "solution"), ("review_result", "feedback")),
        ("Revise", "revise", ("problem", "solution", "feedback"), ("solution",)),
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


@pytest.mark.parametrize("name", ["ScEnsemble", "MdEnsemble"])
@pytest.mark.parametrize("solutions", [[], "A", ["x"] * 27])
def test_an_ensemble_refuses_what_it_cannot_letter(name: str, solutions: Any) -> None:
    with pytest.raises(Refused, match=f"{name}: .* 1 to 26"):
        call(name, ["A"], solutions=solutions, problem="?")


def letter_of(text: str) -> Callable[[Sequence[Message]], str]:
    """An executor that always prefers one text, wherever it stands."""

    def reply(messages: Sequence[Message]) -> str:
        lines = messages[0]["content"].splitlines()
        letter = next((line[0] for line in lines if line[1:] == f": {text}"), "")
        return f"<thought>It fits.</thought><solution_letter>{letter}</solution_letter>"

    return reply


def test_md_ensemble_votes_over_shuffled_orders_that_are_the_same_each_time() -> None:
    solutions = ["6", "7", "8", "9"]
    answer, events = call("MdEnsemble", letter_of("8"), solutions=solutions, problem="?")
    assert answer == {"solution": "8"}
    assert len(events) == 5
    assert len({asked(event) for event in events}) > 1
    again = call("MdEnsemble", letter_of("8"), solutions=solutions, problem="?")[1]
    assert [asked(event) for event in again] == [asked(event) for event in events]


@pytest.mark.parametrize("cast", [0, 1])
def test_md_ensemble_leaves_out_votes_for_nothing(cast: int) -> None:
    replies = [letter_of("6")] * cast + [lambda _: "Z"] * (5 - cast)

    def reply(asked: Sequence[Message]) -> str:
        return replies.pop()(asked)

    answer, _ = call("MdEnsemble", reply, solutions=["6", "8", "8"], problem="?")
    assert answer == {"solution": "6" if cast else "8"}


ADD = '''def add(a, b):
    """Add two numbers.

    >>> add(1, 2)
    3

    add(2, 2) == 4
    """
'''
GOOD = "def add(a, b):\n    return a + b"
BAD = "def add(a, b):\n    return a - b"


@pytest.mark.parametrize(
    ("about", "solution", "entry_point", "error"),
    [
        (ADD, GOOD, "add", ""),
        (ADD, f"Here it is:\n```python\n{GOOD}\n```", "add", ""),
        (ADD, "    return a + b", "add", ""),
        (ADD, BAD, "add", "add(1, 2) gave -1, not 3\nadd(2, 2) gave 0, not 4"),
        (ADD, "def add(a, b):\n    return a / 0", "add", "add(1, 2) raised ZeroDivisionError: division by zero"),
        (ADD, "def plus(a, b): ...", "add", "it does not define add"),
        (ADD, "def add(", "add", "SyntaxError"),
        (ADD, "import sys\nsys.exit()", "add", "it ended before its tests did"),
        (ADD, "while True: pass", "add", "wall time"),
        ("Write add.", BAD, "add", ""),
        ("Write add.", GOOD, "plus", "it does not define plus"),
        ("What is 6 times 7?", "print(6 * 7)", "", ""),
        ("helper", GOOD, "add", ""),
    ],
)
def test_test_runs_the_examples_of_the_problem_or_else_looks_at_the_definition(
    about: str, solution: str, entry_point: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(SETTINGS), "sandbox", SETTINGS.sandbox.model_copy(update={"wall_s": 1.0}))
    arguments = {"problem": "?", "solution": solution, "entry_point": entry_point, "test_loop": 1}
    answer, events = call("Test", [solution], about=about, **arguments)
    assert answer["result"] is not bool(error)
    assert [event.kind for event in events] == (["sandbox", "chat", "sandbox"] if error else ["sandbox"])
    assert not error or error in asked(events[1])


def test_test_revises_a_solution_until_it_passes() -> None:
    replies = [f"Mended:\n```python\n{code}\n```" for code in (BAD, GOOD)]
    answer, events = call("Test", replies, about=ADD, problem="Write it.", solution=BAD, entry_point="add")
    assert answer == {"result": True, "solution": GOOD}
    assert [event.kind for event in events] == ["sandbox", "chat", "sandbox", "chat", "sandbox"]
    assert BAD in asked(events[1])
    assert "Write it." in asked(events[1])
    assert "add(1, 2) gave -1, not 3" in asked(events[1])


def test_test_gives_the_last_revision_when_none_passes() -> None:
    last = "def add(a, b):\n    return 0"
    arguments = {"problem": "?", "solution": BAD, "entry_point": "add", "test_loop": 2}
    answer, events = call("Test", [BAD, last], about=ADD, **arguments)
    assert answer == {"result": False, "solution": last}
    assert [event.kind for event in events].count("sandbox") == 3


@pytest.mark.parametrize("test_loop", [-1, 11, "3", 1.5, None])
def test_test_refuses_a_loop_that_is_no_small_number(test_loop: Any) -> None:
    with pytest.raises(Refused, match="from 0 to 10"):
        call("Test", [], problem="?", solution="", entry_point="", test_loop=test_loop)


@pytest.mark.parametrize(
    ("reply", "approved", "feedback"),
    [
        ("<review_result>True</review_result><feedback>Fine.</feedback>", True, "Fine."),
        ("<review_result> yes </review_result><feedback>", True, ""),
        ("<review_result>False</review_result><feedback>2 is even.", False, "2 is even."),
        ("I cannot tell. ", False, "I cannot tell."),
        ("<review_result>maybe</review_result>", False, "<review_result>maybe</review_result>"),
    ],
)
def test_a_review_without_a_clear_verdict_approves_of_nothing(reply: str, approved: bool, feedback: str) -> None:
    assert call("Review", [reply], problem="?", solution="2")[0] == {"review_result": approved, "feedback": feedback}


def test_format_and_revise_hand_over_the_reply() -> None:
    answer, (event,) = call("Format", [" 42\n"], problem="What is it?", solution="It is {42}.")
    assert answer == {"solution": "42"}
    assert "It is {42}." in asked(event)
    answer, (event,) = call("Revise", [" 43\n"], problem="What is it?", solution="42", feedback="One more.")
    assert answer == {"solution": "43"}
    assert "One more." in asked(event)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_provider_that_breaks_is_a_fault(name: str) -> None:
    arguments = {parameter: ["x"] if parameter == "solutions" else "x" for parameter in OPERATORS[name].required}
    with pytest.raises(ProviderError):
        call(name, [ProviderError("down", cause="unreachable")], **arguments)


def test_only_chat_events_carry_tokens_so_that_they_add_up() -> None:
    _, events = call("Programmer", ["def solve():\n    return 1"], problem="?")
    chat, ran = events
    assert chat.prompt_tokens > 0
    assert chat.completion_tokens > 0
    assert (ran.prompt_tokens, ran.completion_tokens, ran.cost) == (0, 0, 0.0)
    assert ran.outputs["value"] == "1"
