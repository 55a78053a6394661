"""Tasks to train on, and tasks to measure with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradeflow.benchmarks import splits
from gradeflow.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "benchmark", "train", "validation"),
    [
        ("engineering_mini", "engineering", 16, ("industry-4", "industry-5", "industry-18", "industry-19")),
        ("engineering_valset", "engineering", 5, ("industry-15", "industry-16")),
        ("mathmodeling_pair", "mathmodeling", 1, ("mamo-complex-1",)),
    ],
)
def test_the_originals_splits(name: str, benchmark: str, train: int, validation: tuple[str, ...]) -> None:
    found = splits.named(name, benchmark)
    assert (len(found.train), found.validation) == (train, validation)
    assert not set(found.train) & set(found.validation)


def test_a_split_belongs_to_a_benchmark() -> None:
    with pytest.raises(SettingsError, match="expected one of engineering_mini"):
        splits.named("mini", "engineering")
    with pytest.raises(SettingsError, match=r"is one of engineering; solve\.benchmark is mle"):
        splits.named("engineering_mini", "mle")


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 9), st.integers(1, 9))
def test_a_share_is_drawn_for_validation(count: int, share: float, seed: int, least: int) -> None:
    tasks = [f"t-{number}" for number in range(count)]
    found = splits.drawn(tasks, share, seed, least)
    assert sorted(found.train + found.validation) == sorted(tasks)
    assert found.validation
    assert len(found.train) >= min(least, count - 1)
    assert found == splits.drawn(tasks[::-1], share, seed, least)


def test_the_seed_decides_which() -> None:
    """The original took the first ones in the order of their names."""
    tasks = [f"t-{number}" for number in range(20)]
    assert len({splits.drawn(tasks, 0.2, seed, 4).validation for seed in range(9)}) > 3


def test_one_task_alone_is_for_both() -> None:
    assert splits.drawn(["t"], 0.2, 0, 4) == (("t",), ("t",))
