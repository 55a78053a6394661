"""DROP: questions that need counting, sorting or arithmetic over a passage.

Original: an object of passages by section, `{section: {passage, qa_pairs: [{question, query_id, answer,
validated_answers}]}}`, where an answer is `{number, date: {day, month, year}, spans: [...]}` with one of the three
filled; `rows` makes one row of each question. Hub: flat rows with `answers_spans: {spans, types}`, which runs all
answers together: what most annotators gave is taken for the answer, and spans given equally often for one answer of
several spans, as they are in the training split. AFlow: `context` with passage and question, `ref_text` with answers
divided by `|`. Several spans are joined by `and`, as AFlow does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import items, kept, mapping, shown, text, texts
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

DATE = ("day", "month", "year")

_ARCHIVES = {
    "https://s3-us-west-2.amazonaws.com/allennlp/datasets/drop/drop_dataset.zip": (
        "39d2278a29fd729de301b111a45f434c24834f40df8f4ff116d864589e3249d6"
    ),
    "https://ai2-public-datasets.s3.amazonaws.com/drop/drop_dataset.zip": "",
}

PUBLISHED = Published(
    home="https://allenai.org/data/drop",
    licence="CC-BY-SA-4.0",
    attribution="Dua, Wang, Dasigi, Stanovsky, Singh, Gardner: DROP, NAACL 2019, arXiv:1903.00161",
    files=(
        File("train", _ARCHIVES, member="drop_dataset/drop_dataset_train.json"),
        File("validation", _ARCHIVES, member="drop_dataset/drop_dataset_dev.json"),
    ),
)


def rows(record: Mapping[str, Any]) -> Iterator[Row]:
    """The questions of one passage of the original file, whose section stands in `key`; a flat row is one already."""
    if "qa_pairs" not in record:
        yield dict(record)
        return
    passage = {"section_id" if name == "key" else name: value for name, value in record.items() if name != "qa_pairs"}
    for pair in items(record["qa_pairs"], "qa_pairs"):
        yield {**passage, **mapping(pair, "qa_pairs")}


def example(row: Mapping[str, Any]) -> Example:
    if "qa_pairs" in row:
        raise DataError("field qa_pairs: a passage with several questions; drop.rows makes a row of each")
    passage, question = _aflow(row) if "context" in row else (text(row, "passage"), text(row, "question"))
    answers = _answers(row)
    said = list(dict.fromkeys(filter(None, map(_said, answers))))
    if not said:
        raise DataError("field answer: the row has no answer, as in splits published without; take another split")
    problem = f"{passage}\nQuestion: {question}"
    return Example(
        id=identify("drop", problem),
        source="drop",
        problem_type="qa",
        problem=problem,
        ground_truth=said[0],
        extra={
            "question": question,
            "alternatives": said[1:],
            "answer": answers[0],
            "validated_answers": answers[1:],
            **kept(row, "section_id", "query_id"),
        },
    )


def _aflow(row: Mapping[str, Any]) -> tuple[str, str]:
    context = text(row, "context").strip().removesuffix("Answer:").rstrip()
    passage, found, question = context.removeprefix("Passage:").strip().rpartition("\nQuestion:")
    if not found:
        raise DataError(f"field context: holds {shown(context)}; expected `Passage: ...`, `Question: ...`")
    return text({"context": passage.strip()}, "context"), text({"context": question.strip()}, "context")


def _answers(row: Mapping[str, Any]) -> list[Row]:
    """The answers of a row in the original's form, the one of its author first."""
    if "ref_text" in row:
        return [_spans([said.strip()]) for said in text(row, "ref_text").split("|")]
    if "answers_spans" in row:
        return _of_hub(mapping(row["answers_spans"], "answers_spans"))
    answers = [row.get("answer"), *items(row.get("validated_answers") or [], "validated_answers")]
    return [_answer(mapping(answer, "answer")) for answer in answers]


def _answer(answer: Mapping[str, Any]) -> Row:
    found: Row = dict(kept(answer, "number", "worker_id", "hit_id"))
    if answer.get("date") is not None:
        found["date"] = kept(mapping(answer["date"], "answer.date"), *DATE)
    if answer.get("spans") is not None:
        found["spans"] = texts(answer["spans"], "answer.spans")
    return found


def _of_hub(run_together: Mapping[str, Any]) -> list[Row]:
    counts = Counter(texts(run_together.get("spans"), "answers_spans.spans"))
    if not counts:
        return [_spans([])]
    most = max(counts.values())
    types = set(texts(run_together.get("types", []), "answers_spans.types"))
    agreed = [span for span in counts if counts[span] == most]
    if types <= {"span"}:
        return [_spans(agreed), *(_spans([span]) for span in counts if span not in agreed)]
    return [_spans([span]) for span in sorted(counts, key=lambda span: -counts[span])]


def _spans(spans: Sequence[str]) -> Row:
    return {"number": "", "date": dict.fromkeys(DATE, ""), "spans": list(spans)}


def _said(answer: Row) -> str:
    date = [answer.get("date", {}).get(part, "") for part in DATE]
    spans = answer.get("spans", [])
    return str(answer.get("number", "").strip() or _joined(" ", date) or _joined(" and ", spans))


def _joined(between: str, parts: Sequence[str]) -> str:
    return between.join(filter(None, map(str.strip, parts)))


def original(example: Example) -> Row:
    extra = example.extra
    names = ("section_id", "query_id", "question", "answer", "validated_answers")
    passage = example.problem.removesuffix(f"\nQuestion: {extra['question']}")
    return {"passage": passage} | {name: extra[name] for name in names if name in extra}
