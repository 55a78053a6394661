import pytest

from gradeflow.errors import DataError
from gradeflow.sources import fields

HALF = "\ud800"  # of a surrogate pair: JSON can say it, no UTF-8 file can keep it


@pytest.mark.parametrize("value", [None, "", " \n", 3, ["text"], float("nan"), f"a {HALF}"])
def test_what_is_no_text_is_named_with_what_it_holds(value: object) -> None:
    with pytest.raises(DataError, match=r"^field a: (holds .*|missing); expected text"):
        fields.text({"a": value}, "a")


def test_the_first_field_with_text_is_taken() -> None:
    assert fields.text({"a": "", "b": "x"}, "a", "b") == "x"
    with pytest.raises(DataError, match=r"^field a or b: missing; expected text$"):
        fields.text({}, "a", "b")


def test_fields_that_are_kept_may_be_missing_or_empty_but_not_of_another_type() -> None:
    assert fields.kept({"a": "", "b": None, "d": "x"}, "a", "b", "c", e="d") == {"a": "", "e": "x"}
    for value in (3, HALF):
        with pytest.raises(DataError, match=r"^field d: holds .*; expected text$"):
            fields.kept({"d": value}, e="d")


@pytest.mark.parametrize("value", [None, "text", {"a": 1}, [None], [HALF], [["text"]]])
def test_a_list_of_texts_holds_nothing_else(value: object) -> None:
    with pytest.raises(DataError, match=r"^field a: holds .*; expected a list of texts$"):
        fields.texts(value, "a")


@pytest.mark.parametrize("value", [None, True, 1.0, "", [1]])
def test_a_whole_number_is_no_truth_and_no_fraction(value: object) -> None:
    with pytest.raises(DataError, match=r"^field a: holds .*; expected a whole number or text$"):
        fields.whole(value, "a")


def test_what_a_field_holds_is_shown_shortened() -> None:
    with pytest.raises(DataError) as raised:
        fields.texts([["x" * 5000] * 5000], "a")
    assert len(str(raised.value)) < 500


def test_python_with_an_escape_that_it_warns_of_is_python() -> None:
    fields.python("x = '\\d'", "code")


@pytest.mark.parametrize("code", ["def f(", "\0", "(" * 5000])
def test_what_python_cannot_read_is_refused(code: str) -> None:
    with pytest.raises(DataError, match=r"^field code: holds .*; expected Python"):
        fields.python(code, "code")
