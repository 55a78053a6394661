from collections import Counter

from gradeflow.grpo.questions import LONGEST_REST, Questions
from gradeflow.types import Example


def example(name: str, kind: str) -> Example:
    extra = {"choices": ["a"]} if kind == "choice" else {}
    return Example(name, "", "math" if kind == "math" else "qa", name, "", extra)


DATA = [example(f"m{number}", "math") for number in range(30)] + [
    example(f"c{number}", "choice") for number in range(10)
]


def test_kinds_come_in_the_ratio_of_the_data_at_any_length() -> None:
    questions = Questions(DATA, 0)
    kinds = [questions.draw().kind for _ in range(400)]
    for end in range(1, 400):
        assert abs(Counter(kinds[:end])["choice"] - end / 4) < 1
    for start in range(0, 400, 4):
        assert Counter(kinds[start : start + 4])["choice"] == 1


def test_every_question_comes_once_in_a_pass_and_each_pass_has_its_own_order() -> None:
    questions = Questions(DATA, 0)
    passes = [[questions.draw().id for _ in DATA] for _ in range(3)]
    assert all(sorted(each) == sorted(one.id for one in DATA) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] == [each.id for each in drawn(Questions(list(reversed(DATA)), 0), len(DATA))]
    assert passes[0] != [each.id for each in drawn(Questions(DATA, 1), len(DATA))]


def drawn(questions: Questions, count: int) -> list[Example]:
    return [questions.draw() for _ in range(count)]


def test_a_group_that_is_given_back_is_made_up_for_by_its_kind() -> None:
    questions = Questions(DATA, 0)
    learnt: Counter[str] = Counter()
    for _ in range(100):
        one = questions.draw()
        while one.kind == "choice" and int(one.id[1:]) % 2:
            questions.give_back(one)
            one = questions.draw()
            assert one.kind == "choice"
        learnt[one.kind] += 1
    assert learnt == {"math": 75, "choice": 25}


def test_what_teaches_nothing_is_asked_less_and_less_often() -> None:
    questions = Questions(DATA[:30], 0)
    times: Counter[str] = Counter()
    for _ in range(3000):
        one = questions.draw()
        times[one.id] += 1
        questions.learnt(one, [1.0, 1.0] if one.id == "m0" else [0.0, 0.0] if one.id == "m1" else [0.0, 1.0])
    others = [count for name, count in times.items() if name not in {"m0", "m1"}]
    assert max(others) - min(others) <= 1
    for name in ("m0", "m1"):
        assert 1 < times[name] <= min(others) / LONGEST_REST + 4


def test_a_question_that_divides_its_rollouts_again_is_asked_in_every_pass() -> None:
    questions = Questions(DATA[:3], 0)
    for _ in range(3):
        questions.learnt(DATA[0], [1.0, 1.0])
    assert Counter(one.id for one in drawn(questions, 6))["m0"] == 0
    questions.learnt(DATA[0], [1.0, 0.0])
    assert Counter(one.id for one in drawn(questions, 9))["m0"] == 3


def test_faults_alone_say_nothing_about_a_question() -> None:
    questions = Questions(DATA[:3], 0)
    questions.learnt(DATA[0], [])
    questions.learnt(DATA[0], [1.0])
    assert Counter(one.id for one in drawn(questions, 6))["m0"] == 2


def test_the_order_goes_on_after_an_interruption() -> None:
    import json

    questions, again = Questions(DATA, 0), Questions(DATA, 0)
    for one in drawn(questions, 55):
        questions.learnt(one, [1.0, 1.0] if int(one.id[1:]) % 3 else [1.0, 0.0])
    again.restore(json.loads(json.dumps(questions.state())))
    assert drawn(questions, 100) == drawn(again, 100)
