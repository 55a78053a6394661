"""Whatever a row holds, it becomes an example that can be kept and graded, or a DataError that names a field."""

import ast
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradeflow import scorer, sources
from gradeflow.errors import DataError
from gradeflow.types import Example
from support.raw_rows import RAW

FORMS = [(name, form) for name, forms in RAW.items() for form in forms]
KEYS = sorted({key for forms in RAW.values() for row in forms.values() for key in row})
TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", " ", "A", "#### 1", "\\boxed{1}", "\ud800", "\0", "def f(x): pass", "assert f(1) == 2", "|", "nan"]
)
ATOM = st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | TEXT
VALUE = st.recursive(
    ATOM, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | TEXT, inner, max_size=4)
)
MANY = settings(
    max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside, containers included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in inside:
        yield (*at, key)
        yield from places(held, (*at, key))


def converted(name: str, row: dict[str, Any]) -> tuple[Example | None, str]:
    try:
        return sources.load(name).example(row), ""
    except DataError as error:
        return None, str(error)


def check(name: str, row: dict[str, Any]) -> None:
    example, said = converted(name, row)
    if example is None:
        assert said.startswith("field ")
        assert len(said) < 2000
        return
    assert Example.from_row(json.loads(json.dumps(example.to_row(), allow_nan=False))) == example
    json.dumps(example.to_row(), ensure_ascii=False).encode()
    assert example.problem.strip()
    assert example.ground_truth.strip()
    if example.kind == "choice":
        assert example.ground_truth in scorer.choices(example)
    if example.kind == "code":
        ast.parse(example.extra["test"])
        assert example.extra["entry_point"].isidentifier()


@pytest.mark.parametrize(("name", "form"), FORMS)
@MANY
@given(data=st.data())
def test_a_row_with_one_value_exchanged_or_lost(name: str, form: str, data: st.DataObject) -> None:
    row = copy.deepcopy(RAW[name][form])
    *parents, last = data.draw(st.sampled_from(list(places(row))))
    holder: Any = row
    for key in parents:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(VALUE)
    check(name, row)


@pytest.mark.parametrize("name", RAW)
@MANY
@given(row=st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=8))
def test_a_row_of_anything(name: str, row: dict[str, Any]) -> None:
    check(name, row)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_field_that_is_missing_is_named_or_changes_no_answer(name: str, form: str) -> None:
    row = RAW[name][form]
    whole = sources.load(name).example(row)
    for key in row:
        less, _ = converted(name, {field: value for field, value in row.items() if field != key})
        if less is not None:
            assert (less.kind, less.ground_truth) == (whole.kind, whole.ground_truth)
