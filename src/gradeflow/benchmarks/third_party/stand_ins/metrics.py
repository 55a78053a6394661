"""What graders take from MLE-bench's `metrics`."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def average_precision_at_k(actual: set[Any], predicted: Sequence[Any], k: int) -> float:
    """The mean over `actual` of the precision at each first hit among the first k of `predicted`."""
    if not actual:
        return 0.0
    found: set[Any] = set()
    total = 0.0
    for place, item in enumerate(predicted[:k], start=1):
        if item in actual and item not in found:
            found.add(item)
            total += len(found) / place
    return total / min(len(actual), k)


def mean_average_precision_at_k(actual: Sequence[set[Any]], predicted: Sequence[Sequence[Any]], k: int) -> float:
    scores = [average_precision_at_k(wanted, ranked, k) for wanted, ranked in zip(actual, predicted, strict=False)]
    return float(np.mean(scores))


def dice_coefficient(predicted_mask: Any, true_mask: Any, both_empty_value: float = np.nan) -> float:
    """Twice the overlap over both masks' sizes; of two empty masks what the caller says."""
    if predicted_mask.shape != true_mask.shape:
        raise AssertionError(f"masks of unequal shapes: {predicted_mask.shape} and {true_mask.shape}")
    sizes = np.sum(predicted_mask) + np.sum(true_mask)
    return 2 * np.sum(predicted_mask * true_mask) / sizes if sizes else both_empty_value
