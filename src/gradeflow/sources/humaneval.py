"""HumanEval: functions to complete, with unit tests (openai/human-eval, MIT).

Fields: `task_id`, `prompt`, `entry_point`, `canonical_solution`, and `test`, which defines `check(candidate)`.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import identify, text
from gradeflow.types import Example


def example(row: Mapping[str, Any], source: str = "humaneval") -> Example:
    prompt, test, entry_point = text(row, "prompt"), text(row, "test"), text(row, "entry_point")
    if "def check(" not in test:
        raise DataError("field test: does not define check(candidate)")
    return Example(
        id=identify(source, prompt),
        source=source,
        problem_type="code",
        problem=prompt,
        ground_truth=text(row, "canonical_solution"),
        extra={"entry_point": entry_point, "test": test, "task_id": text(row, "task_id"), "prompt": prompt},
    )
