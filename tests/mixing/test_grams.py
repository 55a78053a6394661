from hypothesis import given
from hypothesis import strategies as st

from gradeflow.mixing.grams import AT_ONCE, Grams, N, words

FEW_WORDS = st.lists(st.sampled_from(["a", "b", "c", "the"]), max_size=40).map(" ".join)


def naive(questions: list[str], text: str) -> bool:
    def grams(one: str) -> set[tuple[bytes, ...]]:
        told = words(one)
        return {tuple(told[start : start + N]) for start in range(len(told) - N + 1)}

    return any(grams(question) & grams(text) for question in questions)


@given(st.lists(FEW_WORDS, max_size=3), st.lists(FEW_WORDS, max_size=6))
def test_a_shared_run_of_words_is_found_if_and_only_if_there_is_one(questions: list[str], rows: list[str]) -> None:
    found = dict(Grams(questions).find(rows))
    assert list(found) == [place for place, row in enumerate(rows) if naive(questions, row)]
    for place, (number, gram) in found.items():
        assert gram.encode() in b" ".join(words(rows[place]))
        assert gram.encode() in b" ".join(words(questions[number]))


def leak(questions: list[str], row: str) -> tuple[int, str] | None:
    return dict(Grams(questions).find([row])).get(0)


def numbered(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_twelve_words_in_common_are_no_leak_and_thirteen_are() -> None:
    question = numbered(*range(20))
    assert leak([question], numbered(*range(12), 99, *range(12, 20))) is None
    assert leak([question], numbered(77, *range(3, 16), 78)) == (0, numbered(*range(3, 16)))


def test_long_words_that_begin_alike_are_not_the_same() -> None:
    question = " ".join(f"misunderstanding{number}" for number in range(13))
    assert leak([question], question.replace("ing9", "ing10")) is None
    assert leak([question], f"So {question}!") == (0, question)


def test_rows_are_found_among_many_and_no_gram_spans_two() -> None:
    question = numbered(*range(20))
    rows = [numbered(number, 0, 1) for number in range(2 * AT_ONCE)]
    rows[AT_ONCE + 7 : AT_ONCE + 9] = [numbered(*range(10)), numbered(*range(10, 20))]
    rows[AT_ONCE + 9] = f"Told: {question}"
    assert [place for place, _ in Grams([question]).find(rows)] == [AT_ONCE + 9]


def test_case_and_punctuation_hide_nothing() -> None:
    question = "If Ann has 3 red apples and 4 green ones, how many apples does she have?"
    said = "(a) IF ANN HAS 3 RED APPLES -- AND 4 GREEN ONES; HOW MANY APPLES DOES SHE HAVE!"
    assert leak([question], said) is not None


def test_a_character_counts_as_a_word_where_words_are_not_divided() -> None:
    chinese, japanese, korean = (
        "小明有三个苹果又买了四个苹果",
        "りんごを三つ持っています何個ですか",
        "사과가세개있습니다몇개입니까",
    )
    for question in (chinese, japanese, korean):
        assert leak([question], f"问题{question}abc") is not None
        assert leak([question], f"{question[:7]}x{question[7:]}") is None
    assert [word.decode() for word in words("GPT模型v2的")] == ["gpt", "模", "型", "v2", "的"]
