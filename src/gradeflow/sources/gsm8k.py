"""GSM8K: grade-school word problems. Original JSONL of openai/grade-school-math (MIT): `question`, `answer`.

The answer ends in `#### N`, with calculator marks `<<48/2=24>>` on the way.
"""

import re
from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import identify, text
from gradeflow.types import Example

ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


def example(row: Mapping[str, Any], source: str = "gsm8k") -> Example:
    problem, solution = text(row, "question"), text(row, "answer")
    found = ANSWER.search(solution)
    if found is None:
        raise DataError("field answer: no line `#### N`")
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="math",
        problem=problem,
        ground_truth=found[1].replace(",", ""),
        extra={"solution": solution},
    )
