"""`gradeflow import FILE --out OUT`: the mixed rows of the program that trained AFlow workflows with an LLM judge.

Its train_mixed.jsonl and val_mixed.jsonl have one form for all datasets: `source`, `problem_type`, `problem`,
`ground_truth` and, by source, `solution`, `entry_point`, `test`, `task_id`, `test_list`, `choices`, `subject`,
`supporting_facts`. Each row is turned back into that of its dataset, and read as such: what graders need and it lacks
is named, and the row set aside.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradeflow import jsonl, sources
from gradeflow.errors import DataError
from gradeflow.params import Params
from gradeflow.sources.fields import mapping, multiple_choice, shown, text, texts
from gradeflow.types import Example


@dataclass(frozen=True, slots=True)
class Aside:
    """A row that no grader could use, and why."""

    source: str
    line: int
    reason: str


def main(params: Params, *, file: Path, out: Path) -> None:  # noqa: ARG001 - as every command is called
    """Write the rows of the original's mixed file as rows of our own, and say what the others lack."""
    found = list(read(file))
    examples = [one for one in found if isinstance(one, Example)]
    for line in told([one for one in found if isinstance(one, Aside)]):
        print(line)
    if not examples:
        raise DataError(f"{file}: no row to grade by; expected the original's train_mixed.jsonl or val_mixed.jsonl")
    jsonl.write(out, (example.to_row() for example in examples))
    print(f"{out}: {len(examples)} rows")


def read(file: Path) -> Iterator[Example | Aside]:
    for number, row in enumerate(jsonl.read(file), start=1):
        try:
            yield example(row)
        except DataError as error:
            yield Aside(str(row.get("source")), number, str(error))


def told(aside: Sequence[Aside]) -> Iterator[str]:
    """A line for each field that rows of a source lack."""
    alike: dict[tuple[str, str], list[Aside]] = defaultdict(list)
    for one in aside:
        alike[one.source, one.reason.partition(":")[0]].append(one)
    for (source, _), rows in sorted(alike.items()):
        yield f"{source}: {len(rows)} rows set aside, the first in line {rows[0].line}: {rows[0].reason}"


def example(row: Mapping[str, Any]) -> Example:
    source = text(row, "source")
    if source not in PUBLISHED_ROWS:
        raise DataError(f"field source: holds {shown(source)}; expected one of {', '.join(PUBLISHED_ROWS)}")
    return sources.load(source).example(PUBLISHED_ROWS[source](row))


def _gsm8k(row: Mapping[str, Any]) -> sources.Row:
    return {"question": row.get("problem"), "answer": row.get("solution")}


def _humaneval(row: Mapping[str, Any]) -> sources.Row:
    return {**row, "prompt": row.get("problem"), "canonical_solution": row.get("ground_truth")}


def _mbpp(row: Mapping[str, Any]) -> sources.Row:
    kept = ("task_id", "test_list", "test_setup_code", "test_imports", "challenge_test_list")
    return {"text": row.get("problem"), "code": row.get("ground_truth")} | {name: row.get(name) for name in kept}


def _hotpotqa(row: Mapping[str, Any]) -> sources.Row:
    kept = ("supporting_facts", "context", "_id", "type", "level")
    return {"question": row.get("problem"), "answer": row.get("ground_truth")} | {name: row.get(name) for name in kept}


def _commonsenseqa(row: Mapping[str, Any]) -> sources.Row:
    choices = mapping(row.get("choices"), "choices")
    labels, said = (texts(choices.get(name, []), "choices") for name in ("label", "text"))
    return {"question": _asked(row, labels, said), "choices": choices, "answerKey": row.get("ground_truth")}


def _mmlu(row: Mapping[str, Any]) -> sources.Row:
    choices = texts(row.get("choices"), "choices")
    question = _asked(row, "ABCD", choices)
    return {"question": question, "choices": choices, "subject": row.get("subject"), "answer": row.get("ground_truth")}


def _asked(row: Mapping[str, Any], labels: Sequence[str], said: Sequence[str]) -> str:
    """The question without its choices, which the original appends to it."""
    problem, appended = text(row, "problem"), multiple_choice("", labels, said)
    if not problem.endswith(appended):
        raise DataError(f"field problem: holds {shown(problem)}; expected its choices at the end")
    return problem.removesuffix(appended)


PUBLISHED_ROWS: Mapping[str, Callable[[Mapping[str, Any]], sources.Row]] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "commonsenseqa": _commonsenseqa,
    "hotpotqa": _hotpotqa,
    "mmlu": _mmlu,
}
