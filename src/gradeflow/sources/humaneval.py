"""HumanEval: functions to complete, with unit tests (openai/human-eval). For evaluation only: it has no training split.

Fields of the original file, of the hub's and of AFlow's: `task_id`, `prompt`, `entry_point`, `canonical_solution`, and
`test`, which defines `check(candidate)`.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import python, shown, text
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

_ORIGINAL = "https://raw.githubusercontent.com/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
_HUB = "https://huggingface.co/datasets/openai/openai_humaneval/resolve/7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"

PUBLISHED = Published(
    home="https://github.com/openai/human-eval",
    licence="MIT",
    attribution="Chen et al.: Evaluating Large Language Models Trained on Code, arXiv:2107.03374 (2021)",
    files=(
        File(
            "test",
            {
                f"{_ORIGINAL}/data/HumanEval.jsonl.gz": (
                    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
                ),
                f"{_HUB}/openai_humaneval/test-00000-of-00001.parquet": (
                    "2f2871a15fbc95b6c683043359f4ed8e144c5a1c4f24f25f66bc51f598dfcfb6"
                ),
            },
        ),
    ),
)


def example(row: Mapping[str, Any], source: str = "humaneval") -> Example:
    prompt, test, entry_point = text(row, "prompt"), text(row, "test"), text(row, "entry_point")
    if "def check(" not in test:
        raise DataError(f"field test: holds {shown(test)}; it does not define check(candidate)")
    python(test, "test")
    if not entry_point.isidentifier():
        raise DataError(f"field entry_point: holds {shown(entry_point)}; expected the name of a function")
    return Example(
        id=identify(source, prompt),
        source=source,
        problem_type="code",
        problem=prompt,
        ground_truth=text(row, "canonical_solution"),
        extra={"entry_point": entry_point, "test": test, "task_id": text(row, "task_id"), "prompt": prompt},
    )


def original(example: Example) -> Row:
    return {**example.extra, "canonical_solution": example.ground_truth}
