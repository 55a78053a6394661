"""Rows that are in Gradeflow's own form already: what `gradeflow import` writes, or another project's mixed files."""

from collections.abc import Mapping
from typing import Any, get_args

from gradeflow.errors import DataError
from gradeflow.sources.fields import shown, text
from gradeflow.types import Example, ProblemType


def example(row: Mapping[str, Any]) -> Example:
    kind = text(row, "problem_type")
    if kind not in get_args(ProblemType):
        raise DataError(f"field problem_type: holds {shown(kind)}; expected one of {', '.join(get_args(ProblemType))}")
    return Example.from_row({**row, **{name: text(row, name) for name in ("id", "source", "problem", "ground_truth")}})
