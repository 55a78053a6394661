"""Tests and intervals for the mean of paired differences, one of each question."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, betaincinv, ndtr, ndtri  # scipy.stats takes most of a second to load

Differences = NDArray[np.float64]

RESAMPLES = 10_000
Z95 = 1.959963984540054
LEFT_OUT = 0.01
"""Probability of the shares of wins that are not looked at."""
WIN_SHARES = 30
DISTINCT = 128
"""Of more distinct differences the bootstrap draws from so many steps, and the mean stays."""


class Interval(NamedTuple):
    low: float
    high: float


def p_gain(differences: Differences) -> float:
    """One-sided, of `no better`: McNemar's exact test for right and wrong, else a paired bootstrap."""
    if not differences.any():
        return 1.0
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        return _mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
    reached = _resampled_means(differences - differences.mean()) >= differences.mean() - 1e-12
    mean, error = _smoothed(differences)  # a bootstrap of a few questions cannot see what is rare
    return max((1 + int(reached.sum())) / (1 + RESAMPLES), float(ndtr(-mean / error)))


def _mcnemar(wins: int, losses: int) -> float:
    return float(bdtrc(wins - 1, wins + losses, 0.5)) if wins else 1.0


def p_loss(differences: Differences, margin: float) -> float:
    """One-sided, of `worse by the margin or more`: small where that is ruled out.

    For right and wrong it is exact, whatever the share of wins: the largest p over those that the wins allow (Berger
    and Boos 1994). For scores between it is the normal approximation.
    """
    if np.isin(differences, (-1.0, 0.0, 1.0)).all():
        return _exact_loss(len(differences), int((differences > 0).sum()), int((differences < 0).sum()), margin)
    mean, error = _smoothed(differences)
    return float(ndtr(-(mean + margin) / error))


def _exact_loss(n: int, wins: int, losses: int, margin: float) -> float:
    if not n:
        return 1.0
    most = min(float(betaincinv(wins + 1, max(n - wins, 1e-9), 1 - LEFT_OUT)), (1 - margin) / 2)
    gained = np.linspace(0.0, most, WIN_SHARES)
    lost = gained + margin
    turn = np.exp(2j * np.pi * np.arange(2 * n + 1) / (2 * n + 1))
    each = lost[:, None] / turn + gained[:, None] * turn + (1 - gained - lost)[:, None]
    chances = np.fft.fft(each**n, axis=1).real / (2 * n + 1)  # of -n to n points in all, from 0 on and around
    fewer = np.arange(-n, losses - wins + 1)
    return min(1.0, float(chances[:, -fewer].sum(axis=1).max()) + LEFT_OUT)


def p_short(differences: Differences, effect: float) -> float:
    """One-sided, of `better by the effect or more`: small where that is ruled out."""
    mean, error = _smoothed(differences)
    return float(ndtr(-(effect - mean) / error))


def _smoothed(differences: Differences) -> tuple[float, float]:
    """Mean and standard error with a win and a loss added: where none was seen there may still be some."""
    n = len(differences) + 2
    mean = float(differences.sum()) / n
    return mean, float(((differences**2).sum() + 2) / n - mean**2) ** 0.5 / n**0.5


def detectable(differences: Differences, alpha: float, power: float) -> float:
    """The mean difference that so many questions show at level alpha with this probability."""
    if not len(differences):
        return float("inf")
    return float(ndtri(1 - alpha) + ndtri(power)) * _smoothed(differences)[1]


def holm(p_values: Sequence[float], among: int = 1) -> list[float]:
    """Adjusted p-values, in their order; each of these tests was the best of `among` equal ones."""
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1) * among
    stepped = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, float)[order] * factors))
    adjusted = np.empty(len(p_values))
    adjusted[order] = stepped
    found: list[float] = adjusted.tolist()
    return found


def bootstrap(differences: Differences) -> Interval:
    """95 % interval of the mean by resampling questions."""
    if not len(differences):
        return Interval(0.0, 0.0)
    low, high = np.quantile(_resampled_means(differences), (0.025, 0.975))
    return Interval(float(low), float(high))


def _resampled_means(differences: Differences) -> Differences:
    """Means of resamples; equal differences are drawn together, by count."""
    values, counts = np.unique(differences, return_counts=True)
    if len(values) > DISTINCT:
        low, step = values[0], (values[-1] - values[0]) / (DISTINCT - 1)
        values, counts = np.unique(low + step * np.round((differences - low) / step), return_counts=True)
        values += differences.mean() - values @ counts / len(differences)
    drawn = np.random.default_rng(0).multinomial(len(differences), counts / len(differences), size=RESAMPLES)
    means: Differences = drawn @ values / len(differences)
    return means


def interval(scores: Sequence[float]) -> Interval:
    """Wilson's 95 % interval of a mean score between 0 and 1."""
    n = len(scores)
    if not n:
        return Interval(0.0, 1.0)
    mean = sum(scores) / n
    centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * (mean * (1 - mean) / n + Z95**2 / (4 * n**2)) ** 0.5
    return Interval(max(0.0, centre - half), min(1.0, centre + half))
