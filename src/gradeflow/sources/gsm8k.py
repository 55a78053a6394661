"""GSM8K: grade-school word problems. Original JSONL of openai/grade-school-math: `question`, `answer`.

The answer ends in `#### N`, with calculator marks `<<48/2=24>>` on the way. The hub's rows are the same; AFlow's
have the number alone as `answer`, and what leads to it as `cot`.
"""

import re
from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import shown, text
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
NUMBER = re.compile(r"-?[0-9,]*\.?[0-9,]*[0-9]\.?")

_ORIGINAL = "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
_HUB = "https://huggingface.co/datasets/openai/gsm8k/resolve/740312add88f781978c0658806c59bc2815b9866/main"

PUBLISHED = Published(
    home="https://github.com/openai/grade-school-math",
    licence="MIT",
    attribution="Cobbe et al.: Training Verifiers to Solve Math Word Problems, arXiv:2110.14168 (2021)",
    files=(
        File(
            "train",
            {
                f"{_ORIGINAL}/grade_school_math/data/train.jsonl": (
                    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
                ),
                f"{_HUB}/train-00000-of-00001.parquet": "",
            },
        ),
        File(
            "test",
            {
                f"{_ORIGINAL}/grade_school_math/data/test.jsonl": (
                    "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
                ),
                f"{_HUB}/test-00000-of-00001.parquet": "",
            },
        ),
    ),
)


def example(row: Mapping[str, Any], source: str = "gsm8k") -> Example:
    problem, solution = text(row, "question"), text(row, "answer")
    if row.get("cot") is not None:
        solution = f"{text(row, 'cot')}\n#### {solution}"
    found = ANSWER.search(solution)
    if found is None or not NUMBER.fullmatch(found[1]):
        raise DataError(f"field answer: holds {shown(solution)}; expected a line `#### N`")
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="math",
        problem=problem,
        ground_truth=found[1].replace(",", ""),
        extra={"solution": solution},
    )


def original(example: Example) -> Row:
    return {"question": example.problem, "answer": example.extra["solution"]}
