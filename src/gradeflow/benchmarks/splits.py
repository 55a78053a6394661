"""Which tasks a policy is trained on, and which are kept from it to measure it."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from gradeflow.errors import SettingsError


class Split(NamedTuple):
    train: tuple[str, ...]
    validation: tuple[str, ...]


def _industry(*numbers: int) -> tuple[str, ...]:
    return tuple(f"industry-{number}" for number in numbers)


NAMED = {
    "engineering_mini": ("engineering", Split(_industry(*range(4), *range(6, 18)), _industry(4, 5, 18, 19))),
    "engineering_valset": ("engineering", Split(_industry(*range(10, 15)), _industry(15, 16))),
    "mathmodeling_pair": ("mathmodeling", Split(("mamo-complex-0",), ("mamo-complex-1",))),
}
"""The original's, each with its benchmark."""


def named(name: str, benchmark: str) -> Split:
    if name not in NAMED:
        raise SettingsError(f"train.tasks.split is {name!r}; expected one of {', '.join(NAMED)}, or none")
    own, split = NAMED[name]
    if own != benchmark:
        raise SettingsError(f"train.tasks.split {name} is one of {own}; solve.benchmark is {benchmark}")
    return split


def drawn(tasks: Sequence[str], validation_share: float, seed: int, least: int) -> Split:
    """A share of the tasks, drawn by the seed, for validation; at least `least` are left to train on, where there are.

    One task alone is trained on and validated with.
    """
    order = sorted(tasks)
    random.Random(seed).shuffle(order)
    if len(order) == 1:
        return Split(tuple(order), tuple(order))
    count = max(1, round(len(order) * validation_share))
    count = max(1, min(count, len(order) - least))
    return Split(tuple(sorted(order[count:])), tuple(sorted(order[:count])))
