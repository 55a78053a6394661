"""CommonsenseQA: multiple choice. The original nested JSONL and the hub's flat rows (MIT) are both read.

Nested: `question: {stem, question_concept, choices: [{label, text}]}`. Flat: `question`, `choices: {label, text}`.
The published test split has no answers and is refused.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import identify, text
from gradeflow.types import Example


def example(row: Mapping[str, Any], source: str = "commonsenseqa") -> Example:
    nested = row.get("question")
    if isinstance(nested, Mapping):
        question, pairs = text(nested, "stem"), [(c["label"], c["text"]) for c in nested.get("choices", [])]
    else:
        choices = row.get("choices") or {}
        question = text(row, "question")
        pairs = list(zip(choices.get("label", []), choices.get("text", []), strict=False))
    if not pairs:
        raise DataError("field choices: empty")
    key = row.get("answerKey")
    if key not in dict(pairs):
        raise DataError(f"field answerKey: {key!r} is none of {', '.join(label for label, _ in pairs)}")
    problem = f"{question} Choices: " + " ".join(f"{label}. {said}" for label, said in pairs)
    labels, texts = zip(*pairs, strict=True)
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="qa",
        problem=problem,
        ground_truth=str(key),
        extra={"choices": {"label": list(labels), "text": list(texts)}},
    )
