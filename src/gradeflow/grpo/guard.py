"""Whether a policy has collapsed, told from the figures of its own steps. Numbers alone: no model, no tracking.

No figure proves a collapse by itself: entropy falls and groups die while a policy learns, and a reward falls when the
questions are hard. Together they do: the mean reward is far below the best that the run has had, and a figure is far
from what it was then.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gradeflow import params

REWARD = "reward"
Verdict = Literal["watching", "healthy", "collapsed"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How far a figure may go from its baseline, as factors of it; the upper limit is `least` at least."""

    below: float = 0.0
    above: float = math.inf
    least: float = 0.0


LIMITS: Mapping[str, Limit] = {
    "valid_share": Limit(below=0.5),
    "entropy": Limit(below=0.1, above=3.0),
    "kl": Limit(above=10.0, least=0.5),  # it starts at 0
    "completion_tokens": Limit(below=1 / 3, above=3.0),
    "dead_group_share": Limit(above=2.0, least=0.9),
    "clip_share": Limit(above=5.0, least=0.3),  # it is 0 on policy
}


@dataclass(frozen=True, slots=True)
class Sign:
    """A figure that is beyond its limit."""

    figure: str
    value: float
    baseline: float
    limit: float

    def __str__(self) -> str:
        side = "below" if self.value < self.limit else "above"
        return f"{self.figure} {self.value:.3g}, {side} {self.limit:.3g} (it was {self.baseline:.3g})"


class Guard:
    """Is told of each step, and says when the policy has collapsed, and when it was healthy for long enough.

    All figures are means over the last `window` steps. Their baselines are those of the window with the best reward, at
    first that of the run's first steps. `state` and `restore` carry it over an interruption.
    """

    def __init__(self, settings: params.Guard, staleness: int = 0) -> None:
        self._settings = settings
        self._proof = settings.window + staleness
        """Steps until all rollouts of a window are by policies that are no older than one."""
        self._recent: deque[Mapping[str, float]] = deque(maxlen=settings.window)
        self._best: Mapping[str, float] = {}
        self._trouble = 0
        self._since = 0

    def look(self, figures: Mapping[str, float]) -> Verdict:
        """What to think after a step with these figures; `reward` must be among them, the others are those of LIMITS.

        `healthy` vouches for the policy as it was when this was said last, or when the run began.
        """
        self._recent.append(dict(figures))
        self._since += 1
        means = self.means()
        if len(self._recent) < self._settings.window:
            return "watching"
        if means[REWARD] > self._best.get(REWARD, -math.inf):
            self._best = means
        drop, best = self._settings.reward_drop, self._best[REWARD]
        fallen, kept = means[REWARD] <= (1 - drop) * best, means[REWARD] >= (1 - drop / 2) * best
        self._trouble = self._trouble + 1 if fallen and self.signs() else 0
        if self._trouble >= self._settings.patience:
            return "collapsed"
        if kept and not self.signs() and self._since >= self._proof:
            self._since = 0
            return "healthy"
        return "watching"

    def signs(self) -> list[Sign]:
        """The figures that are beyond their limits, whatever the reward."""
        means = self.means()
        return [
            Sign(name, means[name], baseline, limit)
            for name, baseline in self._best.items()
            if name in LIMITS and name in means and (limit := _passed(LIMITS[name], means[name], baseline)) is not None
        ]

    def reason(self) -> str:
        fall = f"{REWARD} {self.means()[REWARD]:.3g} (it was {self._best[REWARD]:.3g})"
        return "; ".join([fall, *map(str, self.signs())])

    def means(self) -> dict[str, float]:
        """Of each figure over the window, where it was there."""
        names = dict.fromkeys(name for figures in self._recent for name in figures)
        return {name: statistics.fmean(one[name] for one in self._recent if name in one) for name in names}

    def went_back(self) -> None:
        """The policy is that of an earlier step again, so what was seen since says nothing about it."""
        self._recent.clear()
        self._trouble = self._since = 0

    def state(self) -> dict[str, Any]:
        return {
            "recent": list(self._recent),
            "best": dict(self._best),
            "trouble": self._trouble,
            "since": self._since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent.extend(state["recent"])
        self._best, self._trouble, self._since = state["best"], state["trouble"], state["since"]


def _passed(limit: Limit, value: float, baseline: float) -> float | None:
    """The limit that a value has passed, if it has."""
    lower, upper = limit.below * baseline, max(limit.above * baseline, limit.least)
    if value < lower:
        return lower
    return upper if value > upper else None
