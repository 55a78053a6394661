import itertools
from collections import Counter

import pytest

from gradeflow import judge
from gradeflow.embedded import curriculum
from gradeflow.embedded.curriculum import Lesson
from gradeflow.llm import Reply
from gradeflow.workflow import fixed
from gradeflow.workflow.program import parse


@pytest.fixture(scope="module")
def lessons() -> list[Lesson]:
    return list(itertools.islice(curriculum.lessons(0), 2000))


def about(lessons: list[Lesson], topic: str) -> list[Lesson]:
    return [lesson for lesson in lessons if lesson.topic == topic]


def test_the_same_seed_gives_the_same_lessons(lessons: list[Lesson]) -> None:
    assert list(itertools.islice(curriculum.lessons(0), 50)) == lessons[:50]


def test_topics_come_in_their_shares(lessons: list[Lesson]) -> None:
    found = Counter(lesson.topic for lesson in lessons)
    for topic, share in curriculum.SHARES.items():
        assert abs(found[topic] / len(lessons) - share) < 0.03
    assert sum(curriculum.SHARES.values()) == pytest.approx(1)


def test_every_workflow_that_is_taught_is_valid_as_written(lessons: list[Lesson]) -> None:
    for lesson in about(lessons, "policy"):
        assert parse(lesson.reply).mends == ()


def test_the_operator_that_suits_a_kind_is_used_no_more_than_chance_would(lessons: list[Lesson]) -> None:
    """What GRPO is to find out must not be taught."""
    many = about(list(itertools.islice(curriculum.lessons(1), 40_000)), "policy")
    for kind, sign in {"code": "def ", "choice": " faces ", "text": "Question: ", "math": "How many"}.items():
        chosen = Counter(
            next(name for name in reversed(fixed.OPERATORS) if f" = await self.{snake(name)}(" in lesson.reply)
            for lesson in many
            if sign in lesson.messages[0]["content"].partition("Problem:")[2]
        )
        total = sum(chosen.values())
        assert total > 200
        assert chosen[curriculum.SUITS[kind]] / total == pytest.approx(1 / len(fixed.OPERATORS), abs=0.05)
        assert chosen.most_common(1)[0][0] != curriculum.SUITS[kind]
        assert set(fixed.OPERATORS) - set(chosen) == {curriculum.NEVER[kind]}


def snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")


def test_the_judge_is_taught_verdicts_that_our_parser_reads(lessons: list[Lesson]) -> None:
    verdicts = []
    for lesson in about(lessons, "judge"):
        reply = Reply(lesson.reply, 1, 1, "stop", "taught", 0.0, 0.0)
        verdicts.append(judge.parse(reply, ("", "", "")))
    assert None not in verdicts
    assert 0.35 < sum(map(bool, verdicts)) / len(verdicts) < 0.65


def test_a_verdict_is_true_only_if_the_candidate_names_the_reference(lessons: list[Lesson]) -> None:
    for lesson in about(lessons, "judge"):
        asked = lesson.messages[-1]["content"]
        reference = asked.partition("Reference: <<< ")[2].partition(" >>>")[0]
        candidate = asked.partition("Candidate: <<< ")[2].partition(" >>>")[0]
        assert (reference in candidate) == ("<true_false>True" in lesson.reply)


def test_the_programs_taught_for_word_problems_give_whole_numbers(lessons: list[Lesson]) -> None:
    for lesson in about(lessons, "programmer/math"):
        scope: dict[str, object] = {}
        exec(lesson.reply, scope)
        assert isinstance(scope["solve"](), int)  # type: ignore[operator]
