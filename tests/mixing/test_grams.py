from hypothesis import given
from hypothesis import strategies as st

from gradeflow.mixing.grams import Grams, N, words

FEW_WORDS = st.lists(st.sampled_from(["a", "b", "c", "the"]), max_size=40).map(" ".join)


def naive(questions: list[str], text: str) -> bool:
    def grams(one: str) -> set[tuple[bytes, ...]]:
        told = words(one)
        return {tuple(told[start : start + N]) for start in range(len(told) - N + 1)}

    return any(grams(question) & grams(text) for question in questions)


@given(st.lists(FEW_WORDS, max_size=3), FEW_WORDS)
def test_a_shared_run_of_words_is_found_if_and_only_if_there_is_one(questions: list[str], text: str) -> None:
    found = Grams(questions).find(words(text))
    assert (found is not None) == naive(questions, text)
    if found is not None:
        number, gram = found
        assert gram.encode() in b" ".join(words(text))
        assert gram.encode() in b" ".join(words(questions[number]))


def numbered(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_twelve_words_in_common_are_no_leak_and_thirteen_are() -> None:
    grams = Grams([numbered(*range(20))])
    assert grams.find(words(numbered(*range(12), 99, *range(12, 20)))) is None
    assert grams.find(words(numbered(77, *range(3, 16), 78))) == (0, numbered(*range(3, 16)))


def test_case_and_punctuation_hide_nothing() -> None:
    question = "If Ann has 3 red apples and 4 green ones, how many apples does she have?"
    said = "(a) IF ANN HAS 3 RED APPLES -- AND 4 GREEN ONES; HOW MANY APPLES DOES SHE HAVE!"
    assert Grams([question]).find(words(said)) is not None


def test_a_character_counts_as_a_word_where_words_are_not_divided() -> None:
    chinese, japanese, korean = (
        "小明有三个苹果又买了四个苹果",
        "りんごを三つ持っています何個ですか",
        "사과가세개있습니다몇개입니까",
    )
    for question in (chinese, japanese, korean):
        grams = Grams([question])
        assert grams.find(words(f"问题{question}abc")) is not None
        assert grams.find(words(f"{question[:7]}x{question[7:]}")) is None
    assert [word.decode() for word in words("GPT模型v2的")] == ["gpt", "模", "型", "v2", "的"]
