"""HotpotQA: questions over several paragraphs. Read are the original JSON rows, which AFlow has too, and the hub's.

Original: `_id`, `question`, `answer`, `type`, `level`, `context: [[title, [sentence, ...]], ...]` and
`supporting_facts: [[title, index of the sentence], ...]`. Hub: `id`, and the last two as an object of lists.
The context stays in the problem: without it the questions would be closed-book. The published test split has no
answers and is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import items, kept, label, shown, text, texts, whole
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

_ORIGINAL = "http://curtis.ml.cmu.edu/datasets/hotpot"
_HUB = "https://huggingface.co/datasets/hotpotqa/hotpot_qa/resolve/1908d6afbbead072334abe2965f91bd2709910ab/distractor"

PUBLISHED = Published(
    home="https://hotpotqa.github.io",
    licence="CC-BY-SA-4.0",
    attribution="Yang, Qi, Zhang, Bengio, Cohen, Salakhutdinov, Manning: HotpotQA, EMNLP 2018, arXiv:1809.09600",
    files=(
        File(
            "train",
            {
                f"{_HUB}/train-00000-of-00002.parquet": (
                    "76d3bb3048a7cc73c1958107c0c5872a00d7e7d00c105b81e92f6769e7822e68"
                )
            },
        ),
        File(
            "train",
            {
                f"{_HUB}/train-00001-of-00002.parquet": (
                    "713661628434fbb19fff7392e2e321e4ed107e3c7c7784d0690946e5f722763f"
                )
            },
        ),
        File(
            "validation",
            {
                f"{_HUB}/validation-00000-of-00001.parquet": (
                    "c20b638ca82b21d04fe12e14ff417ad05153d4d215a65de54497fca4e972f7c6"
                ),
                f"{_ORIGINAL}/hotpot_dev_distractor_v1.json": (
                    "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"
                ),
            },
        ),
    ),
)


def example(row: Mapping[str, Any]) -> Example:
    bare = question(row, "hotpotqa")
    own = next((name for name in ("_id", "id") if row.get(name) is not None), None)
    known = kept(row, "type", "level") | ({"_id": whole(row[own], own)} if own else {})
    context = [[title, sentences] for title, sentences in _paragraphs(row)]
    return replace(bare, extra={**bare.extra, "context": context, **known})


def question(row: Mapping[str, Any], source: str) -> Example:
    """What is asked and answered, without the rest of the record."""
    asked, answer = text(row, "question"), label(row, "answer")
    paragraphs = "\n".join(f"{title}: {' '.join(sentences)}" for title, sentences in _paragraphs(row))
    problem = f"{paragraphs}\nQuestion: {asked}"
    return Example(
        id=identify(source, problem),
        source=source,
        problem_type="qa",
        problem=problem,
        ground_truth=answer,
        extra={"question": asked, "supporting_facts": _facts(row)},
    )


def _paragraphs(row: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    found = _pairs(row.get("context"), "context", "title", "sentences")
    if not found:
        raise DataError("field context: empty; without it the question cannot be answered")
    titles = texts([title for title, _ in found], "context")
    return [(title, texts(sentences, "context")) for title, (_, sentences) in zip(titles, found, strict=True)]


def _facts(row: Mapping[str, Any]) -> list[list[Any]]:
    found = _pairs(row.get("supporting_facts"), "supporting_facts", "title", "sent_id")
    texts([title for title, _ in found], "supporting_facts")
    for _, index in found:
        if not isinstance(index, int):
            raise DataError(f"field supporting_facts: holds {shown(index)}; expected the index of a sentence")
    return [[title, index] for title, index in found]


def _pairs(value: Any, field: str, first: str, second: str) -> list[tuple[Any, Any]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        columns = [items(value.get(name), f"{field}.{name}") for name in (first, second)]
        if len(columns[0]) != len(columns[1]):
            raise DataError(f"field {field}: {len(columns[0])} of {first} and {len(columns[1])} of {second}")
        return list(zip(*columns, strict=True))
    pairs = [items(pair, field) for pair in items(value, field)]
    if any(len(pair) != 2 for pair in pairs):
        raise DataError(f"field {field}: holds {shown(value)}; expected pairs of {first} and {second}")
    return [(pair[0], pair[1]) for pair in pairs]


def original(example: Example) -> Row:
    names = ("_id", "question", "supporting_facts", "context", "type", "level")
    return {name: example.extra[name] for name in names if name in example.extra} | {"answer": example.ground_truth}
