"""The promotion statistics: pure functions over the saved samples of two adapters on the same questions.

The questions are what is drawn at random, so several answers to one question count as one: their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradeflow import params
from gradeflow.errors import PromotionError
from gradeflow.types import Sample

RESAMPLES = 10_000
Z95 = 1.959963984540054


class Interval(NamedTuple):
    low: float
    high: float


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


@dataclass(frozen=True, slots=True)
class Decision:
    """What the test says. `n` counts questions, `abstained` the pairs left out because one has no score."""

    promote: bool
    reasons: tuple[str, ...]
    n: int
    mean_challenger: float
    mean_champion: float
    difference: float
    interval: Interval
    p_value: float
    wins: int
    losses: int
    abstained: int


def pair(challenger: Sequence[Sample], champion: Sequence[Sample]) -> tuple[Pair, ...]:
    """Match samples by example and repeat.

    Raises:
        PromotionError: the two were not asked the same questions, or an example has changed in between.
    """
    first, second = _by_key(challenger, "challenger"), _by_key(champion, "champion")
    if odd := sorted(first.keys() ^ second.keys()):
        raise PromotionError(
            f"challenger and champion answered different questions: {len(first)} and {len(second)}, "
            f"{len(odd)} by one alone, such as {odd[0][0]}. Evaluate both on one split with one limit"
        )
    for key, sample in first.items():
        if sample.example_digest != second[key].example_digest:
            raise PromotionError(f"example {key[0]} has changed between the two evaluations. Evaluate both again")
    return tuple(Pair(sample, second[key]) for key, sample in sorted(first.items()))


def _by_key(samples: Sequence[Sample], whose: str) -> dict[tuple[str, int], Sample]:
    found = {(sample.example_id, sample.repeat): sample for sample in samples}
    if len(found) != len(samples):
        raise PromotionError(f"the {whose}'s samples hold {len(samples) - len(found)} examples more than once")
    return found


def decide(
    challenger: Sequence[Sample],
    champion: Sequence[Sample],
    policy: params.Promote,
    *,
    scorers: tuple[str, str] | None = None,
) -> Decision:
    """Whether the challenger takes the champion's place, by a one-sided paired test.

    `scorers` are the versions that scored the challenger and the champion.

    Raises:
        PromotionError: the samples cannot be compared.
    """
    if scorers is not None and scorers[0] != scorers[1]:
        raise PromotionError(f"scored differently: challenger by {scorers[0]}, champion by {scorers[1]}")
    pairs = pair(challenger, champion)
    questions = _questions(pairs)
    first, second = np.array([*questions.values()], dtype=np.float64).reshape(-1, 2).T
    differences = first - second
    n, difference, p_value = len(differences), _mean(differences), _p_value(differences)
    abstained = sum(one.difference is None for one in pairs)
    against = _objections(n, difference, p_value, abstained / max(len(pairs), 1), policy)
    reached = f"{difference:+.1%} over {n} questions, p = {p_value:.2g} (at most {policy.alpha:g})"
    return Decision(
        promote=not against,
        reasons=against or (f"a difference of {reached}",),
        n=n,
        mean_challenger=_mean(first),
        mean_champion=_mean(second),
        difference=difference,
        interval=bootstrap(differences),
        p_value=p_value,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        abstained=abstained,
    )


def _questions(pairs: Sequence[Pair]) -> dict[str, NDArray[np.float64]]:
    """The mean scores (challenger, champion) of each question that has a pair with both."""
    scores: dict[str, list[tuple[float, float]]] = {}
    for one in pairs:
        if one.challenger.score is not None and one.champion.score is not None:
            found = scores.setdefault(one.challenger.example_id, [])
            found.append((one.challenger.score, one.champion.score))
    return {question: np.mean(found, axis=0) for question, found in scores.items()}


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _objections(
    n: int, difference: float, p_value: float, fault_share: float, policy: params.Promote
) -> tuple[str, ...]:
    found = []
    if fault_share > policy.max_fault_share:
        found.append(f"{fault_share:.1%} of the pairs have no score; at most {policy.max_fault_share:.1%} may lack one")
    if n < policy.minimum_n:
        found.append(f"{n} questions are too few to decide on; at least {policy.minimum_n} are needed")
    if difference < policy.minimum_effect:
        found.append(f"a difference of {difference:+.1%} is below the least that counts, {policy.minimum_effect:.1%}")
    if p_value > policy.alpha:
        found.append(f"the difference may be chance: p = {p_value:.2g}, at most {policy.alpha:g} is asked for")
    return tuple(found)


def _p_value(differences: NDArray[np.float64]) -> float:
    """Of `no better than the champion`: McNemar's exact test for right and wrong, else a sign-flip test."""
    if not differences.any():
        return 1.0
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        return _mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
    return _sign_flip(differences)


def _mcnemar(wins: int, losses: int) -> float:
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses, 0.5, alternative="greater").pvalue)


def _sign_flip(differences: NDArray[np.float64]) -> float:
    """The share of random signs that reach the observed sum; equal sizes are flipped together, by count."""
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    positive = np.random.default_rng(0).binomial(counts, 0.5, size=(RESAMPLES, len(counts)))
    sums = (2 * positive - counts) @ sizes
    reached = int((sums >= differences.sum() - 1e-9).sum())
    return (1 + reached) / (1 + RESAMPLES)


def bootstrap(differences: NDArray[np.float64]) -> Interval:
    """95 % interval of the mean by resampling questions; equal differences are drawn together, by count."""
    if not len(differences):
        return Interval(0.0, 0.0)
    values, counts = np.unique(differences, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(differences), counts / len(differences), size=RESAMPLES)
    low, high = np.quantile(drawn @ values / len(differences), (0.025, 0.975))
    return Interval(float(low), float(high))


def interval(scores: Sequence[float]) -> Interval:
    """Wilson's 95 % interval of a mean score between 0 and 1."""
    n = len(scores)
    if not n:
        return Interval(0.0, 1.0)
    mean = sum(scores) / n
    centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * (mean * (1 - mean) / n + Z95**2 / (4 * n**2)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def by_kind(pairs: Sequence[Pair]) -> Mapping[str, NDArray[np.float64]]:
    """The differences of the scored pairs, kind by kind."""
    kinds = sorted({one.challenger.kind for one in pairs})
    found = {
        kind: [one.difference for one in pairs if one.challenger.kind == kind and one.difference is not None]
        for kind in kinds
    }
    return {kind: np.array(values, dtype=np.float64) for kind, values in found.items()}
