import pytest

from gradeflow import evaluate
from gradeflow.errors import TooManyFaults
from gradeflow.types import Sample


def sample(score: float | None) -> Sample:
    fault = "unreachable" if score is None else None
    return Sample("id", "digest", "source", "math", "text", "x", score, "", valid=True, fault=fault)


def test_one_score_is_enough_for_an_evaluation() -> None:
    evaluate.require_scores({"base": [sample(None), sample(0.0)], "adapter": [sample(1.0)]}, "executor")


def test_an_adapter_without_a_single_score_has_not_been_evaluated() -> None:
    with pytest.raises(
        TooManyFaults, match=r"^adapter: no question has a score \(\{'unreachable': 2\}\); when executor answer"
    ):
        evaluate.require_scores({"base": [sample(1.0)], "adapter": [sample(None), sample(None)]}, "executor")
