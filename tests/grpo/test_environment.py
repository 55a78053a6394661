import asyncio
from pathlib import Path

import pytest

from gradeflow import sources
from gradeflow.errors import ProviderError, SettingsError
from gradeflow.grpo.environment import Graded, WorkflowEnvironment, asked
from gradeflow.llm import ScriptedClient
from gradeflow.types import Example, Sample
from gradeflow.workflow import fixed
from support import tiny
from support.chat_server import ChatServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


def example(name: str) -> Example:
    return next(sources.made(name, "test", 0))


def grade(
    folder: Path, completion: str, question: Example, replies: list[str | Exception], **changes: object
) -> Graded:
    """Grade with an executor and judge that reply from a list."""

    async def run() -> Graded:
        environment = WorkflowEnvironment(tiny.settings(folder, train__fault_retries=1, **changes))
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


def tree(graded: Graded) -> list[tuple[str, str | None]]:
    """Each event's kind, and that of the one above it."""
    kinds = [event.kind for event in graded.events]
    return [(event.kind, None if event.parent is None else kinds[event.parent]) for event in graded.events]


def test_the_judge_s_calls_are_below_the_score(folder: Path) -> None:
    verdict = "<analysis>Another port.</analysis><true_false>False</true_false>"
    graded = grade(folder, fixed.program("Custom"), example("places"), ["somewhere", "hm", verdict])
    assert tree(graded) == [
        ("workflow", None), ("operator", "workflow"), ("chat", "operator"),
        ("score", None), ("chat", "score"), ("chat", "score"),
    ]  # fmt: skip
    assert graded.events[-1].outputs["text"] == verdict
    assert graded.events[3].outputs == {"value": 0.0, "by": "judge", "reason": "Another port."}
    assert graded.reason == "Another port."


def test_what_happened_before_a_fault_is_kept_with_its_reason(folder: Path) -> None:
    replies = [ProviderError("down", cause="unreachable")] * 2
    graded = grade(folder, fixed.program("Custom"), example("places"), replies)
    assert tree(graded) == [("workflow", None), ("operator", "workflow"), ("chat", "operator")]
    assert graded.events[-1].outputs == {"error": "ProviderError: down"}
    assert graded.reason == "down"


def test_unit_tests_are_a_run_below_the_score(folder: Path) -> None:
    question = example("functions")
    reply = f"```python\n{question.problem}{question.ground_truth}\n```"
    graded = grade(folder, fixed.program("CustomCodeGenerate"), question, [reply])
    assert tree(graded)[-2:] == [("score", None), ("sandbox", "score")]
    assert (graded.sample.score, graded.events[-1].name) == (1.0, "unit_tests")
    assert "secret" not in graded.events[-1].inputs


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


def test_a_prompt_beyond_the_executor_s_context_is_the_policy_s_failure(folder: Path) -> None:
    refused = ProviderError("a prompt of 9000 tokens; the model's context has 8192", cause="too_long")
    sample = grade(folder, fixed.program("Custom"), example("places"), [refused]).sample
    assert (sample.score, sample.failure, sample.fault) == (0.0, "runtime", None)


def test_the_same_grading_again_asks_no_model_and_gives_the_same_samples(folder: Path, tmp_path: Path) -> None:
    """Only what was answered is kept: a question that brought a fault is asked again."""
    questions = [next(sources.made("places", "test", seed)) for seed in range(4)]

    def reply(messages: list[dict[str, str]]) -> str:
        judging = messages[0]["role"] == "system"
        return "<analysis>Same.</analysis><true_false>True</true_false>" if judging else "in some port"

    async def run(url: str) -> tuple[list[Sample], dict[str, float]]:
        settings = tiny.settings(
            folder, models__base__url=url, models__base__model="stand-in", models__base__cache=tmp_path / "replies"
        )
        environment = WorkflowEnvironment(settings)
        try:
            graded = await environment.grade_all([(fixed.program("Custom"), question) for question in questions])
        finally:
            await environment.close()
        return [one.sample for one in graded], environment.clients.figures()

    with ChatServer(reply) as server:
        first, spent = asyncio.run(run(server.url))
        asked = len(server.bodies)
        again, saved = asyncio.run(run(server.url))
        assert len(server.bodies) == asked > 0
    assert first == again
    assert {sample.by for sample in first} == {"judge"}
    assert (spent["llm/base/hits"], saved["llm/base/hits"]) == (0, asked)
    assert saved["llm/base/tries"] == saved["llm/base/cost"] == 0


def test_a_retry_meets_no_reply_that_was_kept_for_the_judge(folder: Path, tmp_path: Path) -> None:
    judged = []

    def reply(messages: list[dict[str, str]]) -> str:
        if messages[0]["role"] != "system":
            return "in some port"
        judged.append(messages)
        return "<true_false>True</true_false>" if len(judged) == 3 else "I cannot tell."

    async def run(url: str) -> Sample:
        settings = tiny.settings(
            folder,
            models__base__url=url,
            models__base__model="stand-in",
            models__base__cache=tmp_path / "replies",
            train__fault_retries=1,
        )
        environment = WorkflowEnvironment(settings)
        try:
            return (await environment.grade(fixed.program("Custom"), example("places"))).sample
        finally:
            await environment.close()

    with ChatServer(reply) as server:
        sample = asyncio.run(run(server.url))
    assert (sample.score, sample.by, len(judged)) == (1.0, "judge", 3)


def test_without_a_judge_none_is_connected_or_asked_to_be_ready(folder: Path) -> None:
    changes = {"models__other__url": "http://127.0.0.1:9/v1", "models__other__api_key_env": "NOT_SET"}
    settings = tiny.settings(folder, judge__models="[other]", scorer__judge="never", **changes)
    assert asked(settings) == ["base"]
    assert WorkflowEnvironment(settings).judge is None
    with pytest.raises(SettingsError, match="NOT_SET"):
        WorkflowEnvironment(tiny.settings(folder, judge__models="[other]", judge__audit_share=0.1, **changes))


def test_a_text_s_verdict_is_beside_its_score(folder: Path) -> None:
    replies = ["somewhere", "<true_false>True</true_false>"]
    sample = grade(folder, fixed.program("Custom"), example("places"), replies).sample
    assert (sample.score, sample.by, sample.judged) == (1.0, "judge", True)


@pytest.mark.parametrize(("share", "judged"), [(0.0, None), (1.0, True)])
def test_a_share_of_verified_answers_is_shown_to_the_judge_which_does_not_score_them(
    folder: Path, share: float, judged: bool | None
) -> None:
    replies = ["many", "<true_false>True</true_false>"]
    question = example("word_problems")
    sample = grade(folder, fixed.program("Custom"), question, replies, judge__audit_share=share).sample
    assert (sample.score, sample.by, sample.judged) == (0.0, "number", judged)


def test_a_judge_that_fails_when_it_is_checked_costs_no_score(folder: Path) -> None:
    replies = ["many", ProviderError("down", cause="unreachable")]
    question = example("word_problems")
    sample = grade(folder, fixed.program("Custom"), question, replies, judge__audit_share=1.0).sample
    assert (sample.score, sample.fault, sample.judged) == (0.0, None, None)
