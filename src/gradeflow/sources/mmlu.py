"""MMLU: multiple choice over 57 subjects. The original CSV (columns `question`, `A`, `B`, `C`, `D`, `answer`, a letter)
and the hub's rows (`question`, `subject`, `choices` of four, `answer` from 0 to 3) are both read.

The original CSV names the subject in the file's name only. `auxiliary_train`, the training split, comes from other
benchmarks and has no subjects; one form of the hub nests its rows in `train`.
"""

from collections.abc import Mapping
from typing import Any

from gradeflow.errors import DataError
from gradeflow.sources import Row, identify
from gradeflow.sources.fields import kept, multiple_choice, shown, text, texts, whole
from gradeflow.sources.published import File, Published
from gradeflow.types import Example

LETTERS = "ABCD"

_ORIGINAL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"
_ORIGINAL_SHA256 = "bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b"
_HUB = "https://huggingface.co/datasets/cais/mmlu/resolve/c30699e8356da336a370243923dbaf21066bb9fe/all"

PUBLISHED = Published(
    home="https://github.com/hendrycks/test",
    licence="MIT",
    attribution="Hendrycks et al.: Measuring Massive Multitask Language Understanding, ICLR 2021, arXiv:2009.03300",
    files=(
        File(
            "train",
            {f"{_HUB}/auxiliary_train-00000-of-00001.parquet": "", _ORIGINAL: _ORIGINAL_SHA256},
            member="data/auxiliary_train/*.csv",
        ),
        File(
            "validation",
            {
                f"{_HUB}/validation-00000-of-00001.parquet": (
                    "66cdf0b090ccb657d18d13cd81e31fdc55c3467da9642ffb178653268a97c8ef"
                ),
                _ORIGINAL: _ORIGINAL_SHA256,
            },
            member="data/val/*.csv",
        ),
        File(
            "test",
            {
                f"{_HUB}/test-00000-of-00001.parquet": (
                    "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7"
                ),
                _ORIGINAL: _ORIGINAL_SHA256,
            },
            member="data/test/*.csv",
        ),
    ),
)


def example(row: Mapping[str, Any]) -> Example:
    nested = row.get("train")
    if isinstance(nested, Mapping):
        row = nested
    if "choices" in row:
        choices = texts(row["choices"], "choices")
        if len(choices) != len(LETTERS):
            raise DataError(f"field choices: holds {shown(choices)}; expected four")
    else:
        choices = [text(row, letter) for letter in LETTERS]
    problem = multiple_choice(text(row, "question"), LETTERS, choices)
    return Example(
        id=identify("mmlu", problem),
        source="mmlu",
        problem_type="mixed",
        problem=problem,
        ground_truth=_letter(row.get("answer")),
        extra={"choices": choices, **kept(row, "subject")},
    )


def _letter(answer: Any) -> str:
    if answer in (None, "", -1):
        raise DataError("field answer: the row has no answer, as in splits published without; take another split")
    if (said := str(whole(answer, "answer"))) in tuple("0123"):
        return LETTERS[int(said)]
    if said in tuple(LETTERS):
        return said
    raise DataError(f"field answer: holds {shown(answer)}; expected 0 to 3, or A to D")


def original(example: Example) -> Row:
    choices = example.extra["choices"]
    question = example.problem.removesuffix(multiple_choice("", LETTERS, choices))
    return {"question": question, **dict(zip(LETTERS, choices, strict=True)), "answer": example.ground_truth}
