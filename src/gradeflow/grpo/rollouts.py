"""Groups of rollouts on their way: written by the policy, graded in the background, taken by the trainer in order.

A completion's workflow and verdict start when that completion ends. With `train.staleness` s the groups of the next s
updates, or of as many as there still are, are written before the verdicts of this one are waited for, by the policy as
it is now; with 0 the policy that learns from a group is the one that wrote it.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradeflow import models, params
from gradeflow.errors import TooManyFaults
from gradeflow.grpo.episodes import Episode, Episodes
from gradeflow.grpo.questions import Questions
from gradeflow.types import Example, Kind, Rollout, Turn

Group = Sequence[Rollout]
"""The rollouts of one question in one step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update learns from, and what stood in the way.

    `replaced` are the groups that taught nothing and for which others stand in; `waited` is how long, in seconds, the
    trainer had nothing to do but wait for scores.
    """

    groups: Sequence[Group]
    replaced: Sequence[Group]
    waited: float

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def asked(self) -> list[Group]:
        """The groups that taught nothing, too."""
        return [*self.groups, *self.replaced]

    def figures(self) -> dict[str, float]:
        """What is watched, over all that was asked; without a single score there is no reward, rather than one of 0."""
        rollouts = [rollout for group in self.asked for rollout in group]
        scores = [one.sample.score for one in rollouts if one.sample.score is not None]
        return {
            **({"reward": fmean(scores)} if scores else {}),
            "valid_share": fmean(one.sample.valid for one in rollouts),
            "completion_tokens": fmean(len(turn.mask) for one in rollouts for turn in one.turns),
            "dead_group_share": fmean(len(different_scores(group)) < 2 for group in self.asked),
        }


@dataclass(frozen=True, slots=True)
class _Flight:
    example: Example
    version: int
    temperature: float
    episodes: Sequence[Episode]

    def state(self) -> dict[str, Any]:
        """What was written, of which the scores follow; what is still being written is waited for."""
        wrote = [
            [{"ids": turn.completion_ids, "log_probs": turn.log_probs} for turn in episode.turns.result()]
            for episode in self.episodes
        ]
        return {
            "example": self.example.id,
            "version": self.version,
            "temperature": self.temperature,
            "wrote": wrote,
        }


class Rollouts:
    """`take` gives the groups of one update after the other.

    A group without two different scores teaches nothing: another question of its kind stands in for it, as often in a
    step as the settings allow; after that it stays.
    """

    def __init__(self, episodes: Episodes, questions: Questions, settings: params.Train) -> None:
        self._episodes = episodes
        self._questions = questions
        self._settings = settings
        self._flights: deque[_Flight] = deque()
        self._serial = 0
        self._again: list[Example] = []

    @property
    def own_model(self) -> bool:
        """Whether they are written by the trainer's own model."""
        return self._episodes.policy.own_model

    def take(
        self, version: int, temperature: float, meanwhile: Callable[[Sequence[tuple[Turn, float]]], None]
    ) -> Batch:
        """The groups of the update that makes `version + 1`.

        `meanwhile` is called with what they wrote, and at which temperature, for work that needs no score.

        Raises:
            TooManyFaults: more rollouts than allowed have no score.
        """
        wanted, settings = self._settings.prompts_per_step, self._settings
        later = (settings.max_steps - version - 1) // settings.ppo_epochs
        self._fill(wanted * (1 + min(settings.staleness, later)), version, temperature)
        flights = list(self._flights)[:wanted]
        meanwhile(
            [
                (turn, flight.temperature)
                for flight in flights
                for episode in flight.episodes
                for turn in episode.turns.result()
            ]
        )
        started = time.perf_counter()
        groups, replaced = [self._next() for _ in range(wanted)], list[Group]()
        self._require_scores(groups)
        while places := self._dead(groups)[: self._settings.max_replaced_groups - len(replaced)]:
            dead = [groups[place] for place in places]
            for group in dead:
                self._questions.give_back(group[0].example)
            self._fill(len(places), version, temperature)
            for place, group in zip(places, dead, strict=True):
                groups[place] = self._next(group[0].example.kind)
            replaced += dead
            self._require_scores([*groups, *replaced])
        return Batch(groups, replaced, time.perf_counter() - started)

    def state(self) -> dict[str, Any]:
        """What follows from here on. Groups on their way are in it as they were written, without their scores."""
        return {
            "questions": self._questions.state(),
            "serial": self._serial,
            "flights": [flight.state() for flight in self._flights],
            "again": [example.id for example in self._again],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._questions.restore(state["questions"])
        self._serial = state["serial"]
        self._flights.extend(self._go_on(flight) for flight in state["flights"])
        self._again = [self._questions.find(name) for name in state["again"]]

    def start_again(self) -> None:
        """Throw away what is on its way, for another policy to write: the same questions are asked again."""
        for flight in self._flights:
            for episode in flight.episodes:
                episode.rollout.cancel()
        self._serial -= len(self._flights)
        self._again = [*(flight.example for flight in self._flights), *self._again]
        self._flights.clear()

    def _fill(self, wanted: int, version: int, temperature: float) -> None:
        """Have at least so many groups on their way."""
        missing = wanted - len(self._flights)
        if missing <= 0:
            return
        self._episodes.policy.begin(missing * self._settings.group_size)
        for _ in range(missing):
            example = self._again.pop(0) if self._again else self._questions.draw()
            self._flights.append(self._start(example, version, temperature))
        self._episodes.policy.serve(version)

    def _start(self, example: Example, version: int, temperature: float) -> _Flight:
        serial, self._serial = self._serial, self._serial + 1
        seeds = [(self._settings.seed, serial, copy) for copy in range(self._settings.group_size)]
        return _Flight(example, version, temperature, self._episodes.start(example, seeds, version, temperature))

    def _go_on(self, state: Mapping[str, Any]) -> _Flight:
        """A group that was written before an interruption is graded again."""
        example = self._questions.find(state["example"])
        version, temperature = state["version"], state["temperature"]
        episodes = [self._episodes.go_on(example, wrote, version, temperature) for wrote in state["wrote"]]
        return _Flight(example, version, temperature, episodes)

    def _next(self, kind: Kind | None = None) -> Group:
        """The oldest group, of that kind if there is one, when all of it is graded."""
        own = (place for place, flight in enumerate(self._flights) if flight.example.kind == kind)
        place = next(own, 0)
        flight = self._flights[place]
        del self._flights[place]
        with models.leaving_room():
            group = [episode.rollout.result() for episode in flight.episodes]
        self._questions.learnt(flight.example, [one.sample.score for one in group if one.sample.score is not None])
        return group

    def _dead(self, groups: Sequence[Group]) -> list[int]:
        return [place for place, group in enumerate(groups) if len(different_scores(group)) < 2]

    def _require_scores(self, groups: Sequence[Group]) -> None:
        tried = [rollout for group in groups for rollout in group]
        faults = [one.sample.fault or "" for one in tried if one.sample.score is None]
        if len(faults) > self._settings.max_fault_share * len(tried):
            cause = max(set(faults), key=faults.count)
            raise TooManyFaults(
                f"{len(faults)} of {len(tried)} rollouts of a step have no score (mostly {cause}); more than "
                f"train.max_fault_share = {self._settings.max_fault_share}. When "
                f"{self._episodes.environment.needs} answer again, the same command goes on from the last checkpoint",
                cause=cause,
            )


def different_scores(group: Group) -> set[float]:
    """One alone, or none, is nothing to learn from."""
    return {rollout.sample.score for rollout in group if rollout.sample.score is not None}
