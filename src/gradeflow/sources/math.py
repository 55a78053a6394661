r"""MATH: competition problems. Fields of the original's JSON files, of the hub's and of AFlow's rows: `problem`,
`level`, `type`, `solution`; the last `\boxed{...}` of the solution is the answer.

MATH-500, five hundred of its test problems, adds `answer` and `unique_id` and has `subject` for `type`; its
`level` is a number, MATH's is `Level 5`.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import kept, shown, text, whole
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

_ORIGINAL = "https://people.eecs.berkeley.edu/~hendrycks/MATH.tar"
_ORIGINAL_SHA256 = "01256fd7cd5430596fdf07e6e6a5827111b5235b7ffed679c662a12f898932da"
_HUB = (
    "https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval/resolve/"
    "0530c78699ea5e8eb5530600900e1f328b48acad/data"
)

PUBLISHED = Published(
    home="https://github.com/hendrycks/math",
    licence="MIT",
    attribution="Hendrycks et al.: Measuring Mathematical Problem Solving With MATH, NeurIPS 2021, arXiv:2103.03874",
    files=(
        File(
            "train",
            {
                _ORIGINAL: _ORIGINAL_SHA256,
                f"{_HUB}/train-00000-of-00001.parquet": (
                    "eca6e667f4305dd5e5ba09b4fd55e7f3174a0fbe361cdfd4c44758b593a76933"
                ),
            },
            member="MATH/train/*/*.json",
        ),
        File(
            "test",
            {_ORIGINAL: _ORIGINAL_SHA256, f"{_HUB}/test-00000-of-00001.parquet": ""},
            member="MATH/test/*/*.json",
        ),
    ),
)


def example(row: Mapping[str, Any]) -> Example:
    problem, solution = text(row, "problem"), text(row, "solution")
    known: dict[str, Any] = kept(row, "type", "subject", "answer", "unique_id")
    if row.get("level") is not None:
        known["level"] = whole(row["level"], "level")
    answer = boxed(solution) or known.get("answer", "").strip()
    if not answer:
        raise DataError(rf"field solution: holds {shown(solution)}; expected a \boxed{{answer}}")
    return Example(
        id=identify("math", problem),
        source="math",
        problem_type="math",
        problem=problem,
        ground_truth=answer,
        extra={"solution": solution, **known},
    )


def boxed(solution: str) -> str:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, or `\boxed 5$`; empty where there is none that is closed."""
    start, command = max((solution.rfind(command), command) for command in ("\\boxed", "\\fbox"))
    if start < 0:
        return ""
    rest = solution[start + len(command) :]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() if rest.startswith(" ") else ""
    depth = position = 0
    while position < len(rest):
        match rest[position]:
            case "\\":
                position += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if not depth:
            return rest[1:position].strip()
        position += 1
    return ""


def original(example: Example) -> Row:
    return {"problem": example.problem, **example.extra}
