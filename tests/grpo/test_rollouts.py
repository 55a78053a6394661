"""Groups on their way, written by a named stand-in for the policy and graded by one for the environment."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gradeflow.background import Background
from gradeflow.errors import SettingsError, TooManyFaults
from gradeflow.grpo.episodes import Episodes
from gradeflow.grpo.policy import Completion
from gradeflow.grpo.questions import Questions
from gradeflow.grpo.rollouts import Rollouts
from gradeflow.types import Example
from support import tiny
from support.courses import GROUP, QUESTIONS, Grader, by_order

GOOD: list[float | None] = [0.0, 1.0, 1.0, 0.0]
LONE: list[float | None] = [None, None, 1.0, None]
SAME: list[float | None] = [1.0, 1.0, None, 1.0]


class Writer:
    """A stand-in for the policy: writes its seed at once, and counts who has begun and ended."""

    def __init__(self) -> None:
        self.asking = 0
        self.served: list[tuple[int, int]] = []
        self.seeds: list[int] = []

    def begin(self, episodes: int) -> None:
        self.asking += episodes
        self._begun = episodes

    async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion:
        self.seeds.append(seed)
        return Completion((seed % 1000,), (-temperature,))

    def end(self) -> None:
        self.asking -= 1

    def serve(self, version: int) -> None:
        self.served.append((version, self._begun))


@contextmanager
def rollouts(
    grader: Grader, questions: Sequence[Example] = QUESTIONS, **changes: object
) -> Iterator[tuple[Rollouts, Writer]]:
    changes = {"train__prompts_per_step": 2, "train__group_size": GROUP, "train__max_fault_share": 1.0, **changes}
    overrides = {name.replace("__", "."): str(value) for name, value in changes.items()}
    settings = tiny.params.load(tiny.ROOT / "params.yaml", overrides)
    writer: Any = Writer()
    environment: Any = grader
    with Background() as background:
        yield (
            Rollouts(
                Episodes(writer, lambda _: [1, 2], str, environment, background, settings.train),
                Questions(questions, 0),
                settings.train,
            ),
            writer,
        )


def nothing(_: object) -> None:
    pass


def test_another_question_of_its_kind_stands_in_for_a_group_that_teaches_nothing() -> None:
    for dead in (LONE, SAME):
        with rollouts(Grader(by_order([dead, GOOD, GOOD]))) as (found, _):
            batch = found.take(0, 1.0, nothing)
        assert [[one.sample.score for one in group] for group in batch.groups] == [GOOD, GOOD]
        assert [[one.sample.score for one in group] for group in batch.replaced] == [dead]
        assert len({group[0].example.id for group in (*batch.groups, *batch.replaced)}) == 3


@pytest.mark.parametrize(("allowed", "replaced"), [(0, 0), (1, 1), (3, 3)])
def test_a_step_replaces_as_many_groups_as_are_allowed(allowed: int, replaced: int) -> None:
    with rollouts(Grader(by_order([GOOD] + [LONE] * 5)), train__max_replaced_groups=allowed) as (found, writer):
        batch = found.take(0, 1.0, nothing)
    assert len(batch.replaced) == replaced
    assert sum(groups for _, groups in writer.served) == (2 + replaced) * GROUP
    assert [one.sample.score for one in batch.groups[1]] == LONE


def test_too_many_rollouts_without_a_score_stop_the_run_before_others_are_asked() -> None:
    said = r"^3 of 8 rollouts of a step have no score \(mostly no_verdict\).*When judge \(http://127\.0\.0\.1:9/v1\)"
    with rollouts(Grader(by_order([GOOD, LONE])), train__max_fault_share=0.3) as (found, writer):
        with pytest.raises(TooManyFaults, match=said):
            found.take(0, 1.0, nothing)
        assert writer.served == [(0, 2 * GROUP)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_rollout_is_further_behind_than_is_allowed(staleness: int) -> None:
    with rollouts(Grader(lambda _: GOOD), train__staleness=staleness) as (found, writer):
        batches = [found.take(version, 1.0, nothing) for version in range(6)]
        behind = [version - one.version for version, batch in enumerate(batches) for one in batch.rollouts]
    assert max(behind) == staleness
    assert writer.served[0] == (0, 2 * GROUP * (1 + staleness))
    assert writer.served[1:] == [(version, 2 * GROUP) for version in range(1, 6)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stand_in_is_of_the_kind_that_it_stands_in_for(staleness: int) -> None:
    """The second question teaches nothing; others of both kinds are on their way."""
    types: Sequence[Any] = ("math", "mixed")
    mixed = [replace(one, problem_type=types[place % 2]) for place, one in enumerate(QUESTIONS)]
    grades = by_order([GOOD, SAME, *[GOOD] * 4])
    with rollouts(Grader(grades), questions=mixed, train__staleness=staleness) as (found, _):
        batch = found.take(0, 1.0, nothing)
    ((dead,),) = [{one.example.kind for one in group} for group in batch.replaced]
    assert [group[0].example.kind for group in batch.groups] in (["math", "text"], ["text", "math"])
    assert dead == batch.groups[1][0].example.kind


@pytest.mark.parametrize(("epochs", "updates"), [(1, range(4)), (2, range(0, 8, 2))])
def test_nothing_is_written_for_updates_that_never_come(epochs: int, updates: range) -> None:
    changes = {"train__staleness": 3, "train__ppo_epochs": epochs, "train__max_steps": 4 * epochs}
    with rollouts(Grader(lambda _: GOOD), **changes) as (found, writer):
        for version in updates:
            found.take(version, 1.0, nothing)
    assert writer.served == [(0, 4 * 2 * GROUP)]


def test_verdicts_are_waited_for_while_others_are_written() -> None:
    """Each takes 0.2 s; at staleness 2 an update that takes 0.1 s waits for none but the first."""
    with rollouts(Grader(lambda _: GOOD, seconds=0.2), train__staleness=2) as (found, _):
        waited = []
        for version in range(6):
            waited.append(found.take(version, 1.0, nothing).waited)
            time.sleep(0.11)
    assert waited[0] > 0.1
    assert max(waited[1:]) < 0.1


def test_a_verdict_begins_when_its_completion_ends() -> None:
    began: list[float] = []

    class Slow(Writer):
        """A stand-in whose completions end one after the other, 20 ms apart."""

        async def complete(self, prompt: Sequence[int], seed: int, temperature: float, version: int) -> Completion:
            self.seeds.append(seed)
            await asyncio.sleep(0.02 * len(self.seeds))
            return Completion((1,), (0.0,))

    class Clock(Grader):
        async def grade(self, text: str, example: Example) -> Any:
            began.append(time.perf_counter())
            return await super().grade(text, example)

    with rollouts(Clock(lambda _: GOOD)) as (found, _):
        slow: Any = Slow()
        found._episodes.policy = slow
        found.take(0, 1.0, nothing)
    assert len(began) == 2 * GROUP
    assert began[-1] - began[0] > 0.1


def test_what_needs_no_score_is_done_before_scores_are_waited_for() -> None:
    done: list[int] = []
    late = threading.Event()

    class Late(Grader):
        async def grade(self, text: str, example: Example) -> Any:
            await asyncio.to_thread(late.wait, 10)
            done.append(0)
            return await super().grade(text, example)

    def meanwhile(turns: Sequence[object]) -> None:
        done.append(len(turns))
        late.set()

    with rollouts(Late(lambda _: GOOD)) as (found, _):
        found.take(0, 0.5, meanwhile)
    assert done[0] == 2 * GROUP


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_interruption_loses_nothing_that_was_written_and_has_nothing_written_twice(staleness: int) -> None:
    def asked(stops: Sequence[int]) -> tuple[list[Any], list[int]]:
        """What is learnt from and the seeds used, by runs that go on from the state of the one before."""
        learnt, seeds, state, version = [], list[int](), None, 0
        for stop in stops:
            with rollouts(Grader(lambda _: GOOD), train__staleness=staleness) as (found, writer):
                if state is not None:
                    found.restore(state)
                while version < stop:
                    batch = found.take(version, 1.0 + version, nothing)
                    learnt += [(one.example.id, one.version, one.temperature, one.turns) for one in batch.rollouts]
                    version += 1
                state = json.loads(json.dumps(found.state()))
            seeds += writer.seeds
        return learnt, seeds

    whole, halves = asked([6]), asked([2, 3, 6])
    assert whole[0] == halves[0]
    assert Counter(whole[1]) == Counter(halves[1])


def test_a_prompt_that_is_too_long_is_refused() -> None:
    said = r"^train\.max_prompt_tokens is 1; a prompt has 2 tokens"
    with (
        rollouts(Grader(lambda _: GOOD), train__max_prompt_tokens=1) as (found, _),
        pytest.raises(SettingsError, match=said),
    ):
        found.take(0, 1.0, nothing)


def test_what_breaks_in_an_episode_is_raised_and_nobody_is_waited_for() -> None:
    class Broken(Grader):
        async def grade(self, text: str, example: Example) -> Any:
            raise ZeroDivisionError

    with rollouts(Broken(lambda _: GOOD)) as (found, writer):
        with pytest.raises(ZeroDivisionError):
            found.take(0, 1.0, nothing)
        assert writer.asking == 0


def test_what_is_on_its_way_can_be_thrown_away_and_asked_again_of_another_policy() -> None:
    """An interruption right then, too, loses no question."""
    with rollouts(Grader(lambda _: GOOD), train__staleness=1) as (found, writer):
        found.take(0, 1.0, nothing)
        on_their_way = [flight["example"] for flight in found.state()["flights"]]
        seeds = writer.seeds[-2 * GROUP :]
        found.start_again()
        assert found.state()["again"] == on_their_way
        batch = found.take(1, 1.0, nothing)
        assert [group[0].example.id for group in batch.groups] == on_their_way
        assert {one.version for one in batch.rollouts} == {1}
        assert sorted(writer.seeds[2 * 2 * GROUP : 3 * 2 * GROUP]) == sorted(seeds)
