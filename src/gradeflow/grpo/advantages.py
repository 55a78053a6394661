"""What a rollout's score says beside those of its group (GRPO, arXiv 2402.03300, equation 3)."""

import statistics
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-4
"""Is added to a standard deviation, as TRL does."""


def advantages(
    groups: Sequence[Sequence[float | None]], scale: Literal["group", "batch", "none"]
) -> list[list[float | None]]:
    """Score minus the group's mean, over the standard deviation of the group, of the whole batch, or nothing.

    A rollout without a score is in no mean and no deviation, and its advantage is None; so is that of a score alone.
    """
    every = [score for group in groups for score in group if score is not None]
    overall = statistics.stdev(every) if len(every) > 1 else 0.0
    found: list[list[float | None]] = []
    for group in groups:
        scored = [score for score in group if score is not None]
        if len(scored) < 2:
            found.append([None] * len(group))
            continue
        mean = statistics.fmean(scored)
        spread = {"group": statistics.stdev(scored) + EPSILON, "batch": overall + EPSILON, "none": 1.0}[scale]
        found.append([None if score is None else (score - mean) / spread for score in group])
    return found
