"""Answers of two adapters to the same questions, side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradeflow.errors import PromotionError
from gradeflow.types import Sample

Scores = Mapping[str, Sequence[float | None]]
"""Of each question the scores of its answers, in the order of their repeats; None where one has none."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both answers to one question of one repeat."""

    challenger: Sample
    champion: Sample

    @property
    def difference(self) -> float | None:
        """What the challenger scored more; None where either was not scored."""
        if self.challenger.score is None or self.champion.score is None:
            return None
        return self.challenger.score - self.champion.score


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Both on one task: the mean scores of each question that both have a score for.

    `abstained` counts the pairs of answers that were left out, because one has no score, of `pairs`.
    """

    task: str
    challenger: NDArray[np.float64]
    champion: NDArray[np.float64]
    abstained: int
    pairs: int

    @property
    def differences(self) -> NDArray[np.float64]:
        return self.challenger - self.champion

    def __len__(self) -> int:
        return len(self.challenger)


def pair(challenger: Sequence[Sample], champion: Sequence[Sample]) -> tuple[Pair, ...]:
    """Match samples by example and repeat.

    Raises:
        PromotionError: the two were not asked the same questions, or an example has changed in between.
    """
    first, second = _by_key(challenger, "challenger"), _by_key(champion, "champion")
    _require_same([name for name, _ in first], [name for name, _ in second], first.keys() ^ second.keys())
    for key, sample in first.items():
        if sample.example_digest != second[key].example_digest:
            raise PromotionError(f"example {key[0]} has changed between the two evaluations. Evaluate both again")
    return tuple(Pair(sample, second[key]) for key, sample in sorted(first.items()))


def _by_key(samples: Sequence[Sample], whose: str) -> dict[tuple[str, int], Sample]:
    found = {(sample.example_id, sample.repeat): sample for sample in samples}
    if len(found) != len(samples):
        raise PromotionError(f"the {whose}'s samples hold {len(samples) - len(found)} examples more than once")
    return found


def compare(task: str, pairs: Sequence[Pair]) -> Comparison:
    scores: dict[str, tuple[list[float | None], list[float | None]]] = {}
    for one in pairs:
        ours, theirs = scores.setdefault(one.challenger.example_id, ([], []))
        ours.append(one.challenger.score)
        theirs.append(one.champion.score)
    return compare_scores(
        task,
        {question: ours for question, (ours, _) in scores.items()},
        {question: theirs for question, (_, theirs) in scores.items()},
    )


def compare_scores(task: str, challenger: Scores, champion: Scores) -> Comparison:
    """Put scores by question side by side.

    Raises:
        PromotionError: the two were not asked the same questions as often.
    """
    _require_same(list(challenger), list(champion), challenger.keys() ^ champion.keys())
    means, abstained, pairs = [], 0, 0
    for question, ours in challenger.items():
        theirs = champion[question]
        if len(ours) != len(theirs):
            raise PromotionError(f"{task}, question {question}: answered {len(ours)} and {len(theirs)} times")
        if odd := [one for one in (*ours, *theirs) if one is not None and not math.isfinite(one)]:
            raise PromotionError(f"{task}, question {question}: a score is {odd[0]}, which is no number")
        both = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        pairs += len(ours)
        abstained += len(ours) - len(both)
        if both:
            means.append(np.mean(both, axis=0))
    first, second = np.array(means, dtype=np.float64).reshape(-1, 2).T
    return Comparison(task, first, second, abstained, pairs)


def _require_same(first: Sequence[str], second: Sequence[str], odd: "set[object]") -> None:
    if odd:
        one = min(str(key[0] if isinstance(key, tuple) else key) for key in odd)
        raise PromotionError(
            f"challenger and champion answered different questions: {len(first)} and {len(second)}, "
            f"{len(odd)} by one alone, such as {one}. Evaluate both on one split with one limit"
        )


def by_kind(pairs: Sequence[Pair]) -> Mapping[str, NDArray[np.float64]]:
    """The differences of the scored pairs, kind by kind."""
    kinds = sorted({one.challenger.kind for one in pairs})
    found = {
        kind: [one.difference for one in pairs if one.challenger.kind == kind and one.difference is not None]
        for kind in kinds
    }
    return {kind: np.array(values, dtype=np.float64) for kind, values in found.items()}
