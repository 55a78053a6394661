"""CommonsenseQA: multiple choice. The original nested JSONL and the hub's flat rows are both read.

Nested: `id`, `answerKey`, `question: {stem, question_concept, choices: [{label, text}]}`. Flat: `id`, `answerKey`,
`question`, `question_concept`, `choices: {label, text}`. The published test split has no answers and is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import items, kept, label, mapping, multiple_choice, shown, text, texts
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

_ORIGINAL = "https://s3.amazonaws.com/commensenseqa"
_HUB = "https://huggingface.co/datasets/tau/commonsense_qa/resolve/94630fe30dad47192a8546eb75f094926d47e155"

PUBLISHED = Published(
    home="https://www.tau-nlp.org/commonsenseqa",
    licence="MIT",
    attribution="Talmor, Herzig, Lourie, Berant: CommonsenseQA, NAACL 2019, arXiv:1811.00937",
    files=(
        File(
            "train",
            {
                f"{_ORIGINAL}/train_rand_split.jsonl": (
                    "58ffa3c8472410e24b8c43f423d89c8a003d8284698a6ed7874355dedd09a2fb"
                ),
                f"{_HUB}/data/train-00000-of-00001.parquet": (
                    "b0449767ed986bfc2ca52b1244a46ef12f732756727f3cb0a4ab69ac8b3d282b"
                ),
            },
        ),
        File(
            "validation",
            {
                f"{_ORIGINAL}/dev_rand_split.jsonl": (
                    "3210497fdaae614ac085d9eb873dd7f4d49b6f965a93adadc803e1229fd8a02a"
                ),
                f"{_HUB}/data/validation-00000-of-00001.parquet": (
                    "bdbd9bf9cc4d2349b24901038b2ab2f58e10e4e507ad2fd425dca55cd3cb6660"
                ),
            },
        ),
    ),
)


def example(row: Mapping[str, Any]) -> Example:
    bare = question(row, "commonsenseqa")
    nested = row["question"] if isinstance(row["question"], Mapping) else row
    return replace(bare, extra={**bare.extra, **kept(row, original_id="id"), **kept(nested, "question_concept")})


def question(row: Mapping[str, Any], source: str) -> Example:
    """What is asked and answered, without the rest of the record."""
    nested = row.get("question")
    if isinstance(nested, Mapping):
        stem = text(nested, "stem")
        pairs = [mapping(choice, "choices") for choice in items(nested.get("choices"), "choices")]
        labels = texts([pair.get("label") for pair in pairs], "choices")
        said = texts([pair.get("text") for pair in pairs], "choices")
    else:
        stem, choices = text(row, "question"), mapping(row.get("choices"), "choices")
        labels, said = texts(choices.get("label"), "choices"), texts(choices.get("text"), "choices")
    problem = multiple_choice(stem, labels, said)
    key = label(row, "answerKey")
    if key not in labels:
        raise DataError(f"field answerKey: holds {shown(key)}; expected one of {', '.join(labels)}")
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="qa",
        problem=problem,
        ground_truth=key,
        extra={"choices": {"label": labels, "text": said}},
    )


def original(example: Example) -> Row:
    labels, said = example.extra["choices"]["label"], example.extra["choices"]["text"]
    stem = example.problem.removesuffix(multiple_choice("", labels, said))
    choices = [{"label": label, "text": text} for label, text in zip(labels, said, strict=True)]
    row: Row = {"answerKey": example.ground_truth, "question": {"stem": stem, "choices": choices}}
    if "original_id" in example.extra:
        row["id"] = example.extra["original_id"]
    if "question_concept" in example.extra:
        row["question"]["question_concept"] = example.extra["question_concept"]
    return row
