"""Which question is asked next: kinds in the ratio of the data at every step, and what teaches nothing less often."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradeflow.types import Example, Kind

LONGEST_REST = 7
"""Most passes over the data that a question sits out."""


class Questions:
    """An endless order of the examples that follows from the seed and from what was learnt.

    A question whose rollouts all had the same score sits out the next pass over its kind, then three, then seven; one
    that divides them again is asked in every pass. `state` and `restore` carry the order over an interruption.
    """

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        self._seed = seed
        self._ids = {example.id: example for example in examples}
        self._kinds: dict[Kind, list[str]] = {}
        for example in sorted(self._ids.values(), key=lambda example: (example.kind, example.id)):
            self._kinds.setdefault(example.kind, []).append(example.id)
        self._asked: Counter[Kind] = Counter()
        self._places: dict[Kind, int] = dict.fromkeys(self._kinds, 0)
        self._same: Counter[str] = Counter()
        self._rests: Counter[str] = Counter()
        self._orders: dict[tuple[Kind, int], list[str]] = {}

    def draw(self) -> Example:
        """The next question of the kind that is furthest behind its share."""
        count = self._asked.total() + 1
        kind = max(self._kinds, key=lambda kind: len(self._kinds[kind]) / len(self._ids) * count - self._asked[kind])
        self._asked[kind] += 1
        return self._ids[self._next(kind)]

    def give_back(self, example: Example) -> None:
        """Its group is not learnt from, so that another one of its kind is due."""
        self._asked[example.kind] -= 1

    def learnt(self, example: Example, scores: Sequence[float]) -> None:
        """What a group of rollouts, those with a score, got for it."""
        if len(scores) < 2:
            return
        self._same[example.id] = self._same[example.id] + 1 if len(set(scores)) == 1 else 0
        self._rests[example.id] = min(2 ** self._same[example.id] - 1, LONGEST_REST)

    def find(self, example_id: str) -> Example:
        return self._ids[example_id]

    def state(self) -> dict[str, Any]:
        return {
            "asked": dict(self._asked),
            "places": dict(self._places),
            "same": {name: count for name, count in self._same.items() if count},
            "rests": {name: count for name, count in self._rests.items() if count},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._asked, self._places = Counter(state["asked"]), dict(state["places"])
        self._same, self._rests = Counter(state["same"]), Counter(state["rests"])

    def _next(self, kind: Kind) -> str:
        while True:
            turn, place = divmod(self._places[kind], len(self._kinds[kind]))
            self._places[kind] += 1
            found = self._order(kind, turn)[place]
            if not self._rests[found]:
                return found
            self._rests[found] -= 1

    def _order(self, kind: Kind, turn: int) -> list[str]:
        """The kind's questions as they come in its n-th pass."""
        if (kind, turn) not in self._orders:
            order = list(self._kinds[kind])
            random.Random(f"{self._seed} {kind} {turn}").shuffle(order)
            self._orders = {(kind, turn): order, **{key: each for key, each in self._orders.items() if key[0] != kind}}
        return self._orders[kind, turn]
