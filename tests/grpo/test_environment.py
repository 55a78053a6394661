import asyncio
from pathlib import Path

import pytest

from gradeflow import sources
from gradeflow.errors import ProviderError
from gradeflow.grpo.environment import Graded, WorkflowEnvironment
from gradeflow.llm import ScriptedClient
from gradeflow.types import Example
from gradeflow.workflow import fixed
from support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


def example(name: str) -> Example:
    return next(sources.made(name, "test", 0))


def grade(folder: Path, completion: str, question: Example, replies: list[str | Exception]) -> Graded:
    """Grade with an executor and judge that reply from a list."""

    async def run() -> Graded:
        environment = WorkflowEnvironment(tiny.settings(folder, train__fault_retries=1))
        client = ScriptedClient(replies)
        environment.executor = client
        environment.judge._clients = [client]
        try:
            return await environment.grade(completion, question)
        finally:
            await environment.close()

    return asyncio.run(run())


def test_a_right_answer_scores_one_and_says_what_was_called(folder: Path) -> None:
    question = example("word_problems")
    graded = grade(folder, fixed.program("Programmer"), question, [f"def solve():\n    return {question.ground_truth}"])
    assert (graded.sample.score, graded.sample.by, graded.sample.valid) == (1.0, "number", True)
    assert graded.sample.operators == ("Programmer",)
    assert [event.kind for event in graded.events] == ["workflow", "operator", "chat", "sandbox", "score"]


def test_a_wrong_answer_scores_zero_without_failure(folder: Path) -> None:
    graded = grade(folder, fixed.program("Custom"), example("word_problems"), ["many"])
    assert (graded.sample.score, graded.sample.failure) == (0.0, None)


def test_a_broken_workflow_is_the_policy_s_failure(folder: Path) -> None:
    graded = grade(folder, "return await self.", example("places"), [])
    assert (graded.sample.score, graded.sample.failure, graded.sample.valid) == (0.0, "syntax", False)


def test_a_fault_is_tried_again(folder: Path) -> None:
    question = example("places")
    replies = [ProviderError("down", cause="unreachable"), question.ground_truth]
    assert grade(folder, fixed.program("Custom"), question, replies).sample.score == 1.0


def test_a_fault_that_stays_is_no_score(folder: Path) -> None:
    replies = [ProviderError("down", cause="unreachable")] * 2
    sample = grade(folder, fixed.program("Custom"), example("places"), replies).sample
    assert (sample.score, sample.fault, sample.failure) == (None, "unreachable", None)


def test_a_judge_without_verdict_is_no_score(folder: Path) -> None:
    sample = grade(folder, fixed.program("Custom"), example("places"), ["somewhere", "hm", "hm"] * 2).sample
    assert (sample.score, sample.fault) == (None, "no_verdict")
