import pytest

from gradeflow.errors import DataError
from gradeflow.sources import gsm8k, imported

ROW = gsm8k.example({"question": "How many?", "answer": "Two.\n#### 2"}).to_row()


def test_a_row_of_our_own_form_is_kept_as_it_is() -> None:
    assert imported.example(ROW).to_row() == ROW


@pytest.mark.parametrize(
    ("change", "said"),
    [({"problem": ""}, "field problem"), ({"problem_type": "maths"}, "expected one of math"), ({"id": 3}, "field id")],
)
def test_what_does_not_fit_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        imported.example(ROW | change)
