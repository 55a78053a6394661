"""Levels for an evaluation that is looked at while it goes on, so that it may stop early.

Looks are planned beforehand, at shares of the questions. Of the error that is allowed, the share t of the questions has
spent t squared (Kim and DeMets 1987); the level of each look follows by going through the normal path of the statistic
from look to look (Armitage, McPherson and Rowe 1969).
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

POINTS = 801
FAR = 8.0
"""So many standard deviations below 0 there is nothing."""


@dataclass(frozen=True, slots=True)
class Look:
    """The look number `at`, from 0, of those at these `shares` of the questions, of which the last is 1."""

    shares: tuple[float, ...] = (1.0,)
    at: int = 0

    @property
    def is_last(self) -> bool:
        return self.at == len(self.shares) - 1

    def level(self, alpha: float) -> float:
        return alpha if self.shares == (1.0,) else levels(self.shares, alpha)[self.at]


@functools.lru_cache(maxsize=64)
def levels(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """The one-sided level of each look, which together come to alpha."""
    found: list[float] = []
    path, density = np.zeros(1), np.ones(1)
    for before, share in itertools.pairwise((0.0, *shares)):
        spread = (share - before) ** 0.5
        bound = _bound(path, density, spread, alpha * (share**2 - before**2))
        found.append(float(ndtr(-bound / share**0.5)))
        grid = np.linspace(-FAR * share**0.5, bound, POINTS)
        weights = np.full(POINTS, grid[1] - grid[0])
        weights[[0, -1]] /= 2
        steps = np.exp(-(((grid[:, None] - path) / spread) ** 2) / 2) / (spread * (2 * np.pi) ** 0.5)
        path, density = grid, weights * (steps @ density)
    return tuple(found)


def _bound(path: NDArray[np.float64], density: NDArray[np.float64], spread: float, error: float) -> float:
    """What the path is above now with this probability, having been below all bounds before."""
    from scipy.optimize import brentq

    return float(brentq(lambda bound: density @ ndtr((path - bound) / spread) - error, -FAR, FAR, xtol=1e-10))


def even(count: int) -> tuple[float, ...]:
    """The shares of so many looks, evenly spread."""
    return tuple(number / count for number in range(1, count + 1))
