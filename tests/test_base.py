import pytest

from gradeflow import base
from gradeflow.errors import TooManyFaults
from gradeflow.types import KINDS, Sample


def sample(kind: str, score: float | None) -> Sample:
    fault = "unreachable" if score is None else None
    return Sample("id", "digest", "source", kind, "text", "x", score, "", valid=True, fault=fault)  # type: ignore[arg-type]


def test_accuracies_leave_out_what_has_no_score() -> None:
    found = base._accuracies("policy", [sample(kind, score) for kind in KINDS for score in (1.0, 0.0, None)])
    assert found == {"policy/all": 0.5, **{f"policy/{kind}": 0.5 for kind in KINDS}}


def test_a_kind_without_a_single_score_is_a_fault_and_no_accuracy() -> None:
    samples = [sample(kind, None if kind == "text" else 1.0) for kind in KINDS]
    with pytest.raises(TooManyFaults, match=r"policy: no question about text has a score \(\{'unreachable': 1\}\)"):
        base._accuracies("policy", samples)
