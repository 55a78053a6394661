import pytest

from gradeflow.mixing.quota import quotas, shares


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ({"a": 1, "b": 1}, 10, {"a": 5, "b": 5}),
        ({"a": 0.4, "b": 0.3, "c": 0.3}, 4, {"a": 2, "b": 1, "c": 1}),
        ({"a": 1, "b": 1, "c": 1}, 10, {"a": 4, "b": 3, "c": 3}),
        ({"a": 5, "b": 1}, 0, {"a": 0, "b": 0}),
        ({"a": 0.1, "b": 0.9}, 1, {"a": 0, "b": 1}),
    ],
)
def test_shares_are_exact_by_largest_remainder(weights: dict[str, float], total: int, expected: dict[str, int]) -> None:
    assert shares(weights, total) == expected


@pytest.mark.parametrize(
    ("there", "total", "whole", "expected"),
    [
        ({"a": 100, "b": 100, "c": 100}, 40, (), {"a": 20, "b": 10, "c": 10}),
        ({"a": 5, "b": 100, "c": 100}, 41, (), {"a": 5, "b": 18, "c": 18}),
        ({"a": 5, "b": 3, "c": 100}, 40, (), {"a": 5, "b": 3, "c": 32}),
        ({"a": 5, "b": 3, "c": 2}, 40, (), {"a": 5, "b": 3, "c": 2}),
        ({"a": 100, "b": 9, "c": 100}, 20, ("b",), {"a": 7, "b": 9, "c": 4}),
        ({"a": 100, "b": 30, "c": 100}, 20, ("b",), {"a": 0, "b": 30, "c": 0}),
    ],
)
def test_what_one_source_lacks_the_others_make_up_for(
    there: dict[str, int], total: int, whole: tuple[str, ...], expected: dict[str, int]
) -> None:
    assert quotas(there, {"a": 2, "b": 1, "c": 1}, total, whole) == expected
