"""HotpotQA: questions over several paragraphs (data CC BY-SA 4.0). Original JSON rows and the hub's dict-of-lists.

The context stays in the problem: without it the questions would be closed-book.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import identify, text
from gradeflow.types import Example


def example(row: Mapping[str, Any], source: str = "hotpotqa") -> Example:
    question, answer = text(row, "question"), text(row, "answer")
    context = _pairs(row.get("context"), "title", "sentences")
    if not context:
        raise DataError("field context: empty; without it the question cannot be answered")
    paragraphs = "\n".join(f"{title}: {' '.join(sentences)}" for title, sentences in context)
    problem = f"{paragraphs}\nQuestion: {question}"
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="qa",
        problem=problem,
        ground_truth=answer,
        extra={
            "question": question,
            "supporting_facts": [list(fact) for fact in _pairs(row.get("supporting_facts"), "title", "sent_id")],
        },
    )


def _pairs(value: Any, first: str, second: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(zip(value.get(first, []), value.get(second, []), strict=False))
    return [(pair[0], pair[1]) for pair in value or []]
