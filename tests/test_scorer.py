import asyncio
import gzip
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gradeflow import params, sources
from gradeflow.embedded import curriculum
from gradeflow.errors import ProviderError, SandboxError
from gradeflow.judge import Judge, messages
from gradeflow.llm import ScriptedClient
from gradeflow.sandbox import Sandbox
from gradeflow.scorer import Scorer, chosen, last_number, normalise, plain_number, token_f1
from gradeflow.sources import gsm8k, humaneval
from gradeflow.types import Abstained, Example, Outcome, Score
from support.judges import JUDGE

SETTINGS = params.Scorer(number_tolerance=0.0, tests_wall_s=5.0, judge="text")
SANDBOX = params.Sandbox(
    isolation="auto",
    wall_s=20.0,
    cpu_s=20,
    memory_mb=1024,
    processes=32,
    disk_mb=16,
    output_kb=64,
    parallel=2,
)
YES = "<analysis>the same</analysis><true_false>True</true_false>"
NO = "<analysis>another</analysis><true_false>False</true_false>"


def judge(*replies: str | Exception) -> Judge:
    return Judge([ScriptedClient(replies)], JUDGE)


def score(
    example: Example, *answers: str | None, judge: Judge | None = None, decides: str = "text", **changes: Any
) -> Any:
    """The outcome of one answer, or the outcomes of several; the judge `decides` as settings say."""

    async def work() -> list[Outcome]:
        sandbox = Sandbox(SANDBOX)
        try:
            scorer = Scorer(SETTINGS.model_copy(update={"judge": decides, **changes}), sandbox, judge)
            return [await scorer.score(example, answer) for answer in answers]
        finally:
            await sandbox.close()

    outcomes = asyncio.run(work())
    return outcomes[0] if len(outcomes) == 1 else outcomes


def math(ground_truth: str) -> Example:
    return Example("m", "gsm8k", "math", "How many?", ground_truth)


def text(ground_truth: str = "Port Arden") -> Example:
    return Example("t", "places", "qa", "Where does Ann live?", ground_truth)


def choice(ground_truth: str = "B", choices: Any = None) -> Example:
    offered = choices or {"label": list("ABCDE"), "text": ["bank", "the library", "mall", "a dog", "7"]}
    return Example("c", "commonsenseqa", "qa", "Where? Choices: ...", ground_truth, {"choices": offered})


ADD = Example(
    "f",
    "functions",
    "code",
    'def add(a, b):\n    """Add."""\n',
    "    return a + b\n",
    {
        "prompt": 'from math import floor\n\n\ndef add(a, b):\n    """Add."""\n',
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n",
    },
)


@pytest.mark.parametrize("example", [math("3"), text(), choice(), ADD])
@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_no_answer_is_the_policys_own_zero(example: Example, answer: str | None) -> None:
    assert score(example, answer, judge=judge()) == Score(0.0, "empty", "no answer")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("18", 18),
        ("-3", -3),
        ("\u22123", -3),
        ("$1,234.50", Fraction("1234.5")),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$5", 5),
        ("The answer is 1,000,000.", 1_000_000),
        ("18.0", 18),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("1.5e-05", Fraction("0.000015")),
        ("3/4", Fraction(3, 4)),
        ("16 - 3 = 13", 13),
        ("between 3-5", 5),
        ("1,2,3", 3),
        ("50%", 50),
        ("15 cm^2", 15),
        ("Some steps, 7 of them.\n#### 1,200\n", 1200),
        (r"\boxed{42} after 3 steps", 42),
        ("5 apples and 7 pears", 7),
        ("none", None),
        ("9" * 5000, None),
        ("1/0", 0),
    ],
)
def test_the_number_of_an_answer(answer: str, number: Any) -> None:
    assert last_number(answer) == number


@pytest.mark.parametrize(("reference", "number"), [("$1,234.", 1234), (" 12 %", 12), ("-0.5", Fraction(-1, 2))])
def test_a_reference_may_be_dressed_as_a_number(reference: str, number: Any) -> None:
    assert plain_number(reference) == number


@pytest.mark.parametrize("reference", [r"\frac{1}{2}", "x + 1", "3 apples", "1, 2", ""])
def test_a_reference_with_more_than_a_number_is_none(reference: str) -> None:
    assert plain_number(reference) is None


def test_numbers_are_equal_or_not() -> None:
    right, wrong, none = score(math("18"), "It is 18.00", "17", "eighteen")
    assert right == Score(1.0, "number")
    assert wrong == Score(0.0, "number")
    assert (none.value, none.by) == (0.0, "number")


def test_a_tolerance_is_relative_to_the_reference() -> None:
    outcomes = score(math("-200"), "-201.9", "-202.1", "200", number_tolerance=0.01)
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 0.0]
    assert score(math("0"), "0.001", number_tolerance=0.01).value == 0.0


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        (r"$\boxed{B}$", "B"),
        ("B. the library", "B"),
        ("B) foo", "B"),
        ("(B) foo", "B"),
        ("The answer is B", "B"),
        ("the answer is: (B).", "B"),
        ("Answer: B because of A", "B"),
        ("I would go for option B.", "B"),
        ("The library!", "B"),
        ("dog", "D"),
        ("7", "E"),
        ("It is not a bank, so I choose (B).", "B"),
        ("A. bank\nB. the library", None),
        ("the answer is A, or the answer is B", None),
        ("a nice place", None),
        ("the answer is a dog", None),
        ("F", None),
        ("neither", None),
    ],
)
def test_the_choice_of_an_answer(answer: str, label: str | None) -> None:
    assert chosen(answer, dict(zip("ABCDE", ["bank", "the library", "mall", "a dog", "7"], strict=True))) == label


def test_a_choice_is_right_or_wrong() -> None:
    outcomes = score(choice(), "B", "The answer is C", "who knows")
    assert [(outcome.value, outcome.by) for outcome in outcomes] == [
        (1, "choice"),
        (0, "choice"),
        (0, "choice"),
    ]


def test_choices_without_labels_have_letters() -> None:
    assert score(choice("C", ["one", "two", "three", "four"]), "three").value == 1.0


def test_a_reference_that_is_no_choice_is_a_fault() -> None:
    assert score(choice("Z"), "B").cause == "reference"


@pytest.mark.parametrize(
    "answer",
    [
        "def add(a, b):\n    return a + b",
        "```python\ndef add(a, b):\n    return a + b\n```",
        "Use this:\n```python\nprint(1)\n```\nor this:\n```\ndef add(a, b):\n    return a + b\n```\nDone.",
        "    return a + b\n",
        "def add(a, b):\n    return floor(a) + b",
        "from __future__ import annotations\ndef add(a: list[X], b: Y) -> Z:\n    return a + b",
        "import dataclasses as d\n@d.dataclass\nclass P:\n    x: 'int'\ndef add(a, b):\n    return P(a).x + b",
        "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    input()",
    ],
)
def test_a_function_that_passes_its_tests_scores(answer: str) -> None:
    assert score(ADD, answer) == Score(1.0, "unit_tests")


HARNESS = "import harness\ndef add(a, b):\n    return 0\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("def add(a, b):\n    return a - b", "AssertionError"),
        ("def add(a, b)\n    return a", "SyntaxError"),
        ("def plus(a, b):\n    return a + b", "AssertionError"),
        ("def add(a, b):\n    return c", "NameError"),
        ("import sys\nsys.exit(0)", "before its tests"),
        ("import os\nos._exit(0)", ""),
        ("def add(a, b):\n    import sys\n    sys.exit(0)", "before its tests"),
        ("def add(a, b):\n    raise SystemExit", "before its tests"),
        (HARNESS + "harness.result(True)\nraise SystemExit", "before its tests"),
        (HARNESS + "harness.result(harness.inputs)\nraise SystemExit", "before its tests"),
        (HARNESS + "harness.result(harness.inputs.get('secret'))\nraise SystemExit", "before its tests"),
        (HARNESS + "harness.result = print", "AssertionError"),
        (HARNESS + "import builtins\nbuiltins.compile = lambda *_: 'def check(candidate): pass'", "AssertionError"),
        (HARNESS + "import builtins\nbuiltins.exec = lambda _, names: names.update(check=id)", "AssertionError"),
        (HARNESS + "import sys\nsys.modules['tests'] = sys.modules['answer']", "AssertionError"),
        ("def add(a, b):\n    return 0\ndef check(candidate):\n    pass", "AssertionError"),
        ("def add(a, b):\n    while True: pass", ""),
        ("def add(a, b):\n    return 'a' * 10**11", ""),
    ],
)
def test_a_function_that_does_not_pass_its_tests_scores_zero(answer: str, reason: str) -> None:
    outcome = score(ADD, answer, tests_wall_s=1.5)
    assert (outcome.value, outcome.by) == (0.0, "unit_tests")
    assert reason in outcome.reason
    assert outcome.reason


def test_helpers_of_the_tests_are_those_that_were_given() -> None:
    given = "def twice(x):\n    return 2 * x\n\n\n" + ADD.extra["prompt"]
    test = "def check(candidate):\n    assert candidate(1, 1) == twice(1)\n    assert add is candidate\n"
    example = Example(**{**_fields(ADD), "extra": {**ADD.extra, "prompt": given, "test": test}})
    outcomes = score(
        example,
        "def add(a, b):\n    return a + b",
        "def twice(x):\n    return 0\ndef add(a, b):\n    return 0",
    )
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0]


def _fields(example: Example) -> dict[str, Any]:
    return {name: getattr(example, name) for name in Example.__slots__}


@pytest.mark.parametrize("change", [{"test": "def check(candidate)"}, {"entry_point": None}, {"test": "x = 1"}])
def test_unit_tests_that_cannot_run_are_a_fault(change: dict[str, Any]) -> None:
    example = Example(**{**_fields(ADD), "extra": {**ADD.extra, **change}})
    assert score(example, "def add(a, b):\n    return a + b").cause == "tests"


class BrokenSandbox(Sandbox):
    """A stand-in whose every run breaks."""

    async def run(self, *_: Any, **__: Any) -> Any:
        raise SandboxError("no isolated interpreter", cause="sandbox")


@pytest.mark.parametrize("example", [ADD, math(r"\frac{1}{2}")])
def test_a_broken_sandbox_is_no_score(example: Example) -> None:
    scorer = Scorer(SETTINGS, BrokenSandbox(SANDBOX), None)
    outcome = asyncio.run(scorer.score(example, "def add(a, b):\n    return a + b"))
    assert outcome == Abstained("sandbox", "no isolated interpreter")


def test_mathematics_beyond_numbers_is_compared_by_its_value() -> None:
    outcomes = score(math(r"\frac{1}{2}"), "0.5", r"The answer is $\frac{2}{4}$.", r"$\frac{1}{3}$", "nothing")
    assert [(outcome.value, outcome.by) for outcome in outcomes] == [
        (1, "math"),
        (1, "math"),
        (0, "math"),
        (0, "math"),
    ]


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (
            r"2\sqrt{3}",
            [r"\sqrt{12}", r"So it is $\boxed{2\sqrt{3}}$.", r"thus \(\sqrt{12}\)"],
            ["2", "3", r"$\sqrt{6}$"],
        ),
        ("x + 1", ["1 + x", r"$\boxed{x+1}$"], ["1", "x", "The answer is 1"]),
    ],
)
def test_an_expression_is_read_as_a_whole(reference: str, right: list[str], wrong: list[str]) -> None:
    outcomes = score(math(reference), *right, *wrong)
    assert [outcome.value for outcome in outcomes] == [1.0] * len(right) + [0.0] * len(wrong)


def test_a_reference_that_nobody_can_read_is_a_fault() -> None:
    assert score(math(" "), "4").cause == "reference"


def test_each_answer_that_annotators_gave_is_right() -> None:
    example = replace(text("27"), extra={"alternatives": ["twenty seven", "27 yards"]})
    assert score(example, "27 yards", judge=judge()) == Score(1.0, "exact")
    assert score(example, "some twenty seven").value == pytest.approx(0.8)


def test_an_exact_answer_needs_no_judge() -> None:
    assert score(text(), "the port ARDEN.", judge=judge()) == Score(1.0, "exact")


def test_other_text_goes_to_the_judge() -> None:
    assert score(text(), "in Port Arden", judge=judge(YES)) == Score(1.0, "judge", "the same")
    assert score(text(), "Holm", judge=judge(NO)) == Score(0.0, "judge", "another")


def test_the_judge_is_asked_as_the_embedded_one_was_taught_to_answer() -> None:
    """The question alone, without the paragraphs that it is about."""
    example = next(sources.made("places", "test", 0))
    given = curriculum.case(example, random.Random(0))
    client = ScriptedClient([YES])
    score(example, given.answer, judge=Judge([client], JUDGE))
    assert client.calls == [messages(given.question, given.reference, given.answer)]
    assert example.problem not in client.calls[0][-1]["content"]


def test_a_judge_that_fails_or_does_not_decide_is_no_score() -> None:
    down = score(text(), "Holm", judge=judge(ProviderError("no reply", cause="unreachable")))
    assert down == Abstained("unreachable", "no reply")
    assert score(text(), "Holm", judge=judge("well", "")).cause == "no_verdict"


@pytest.mark.parametrize(("given", "decides"), [(judge(), "never"), (None, "text"), (None, "always")])
def test_without_a_judge_text_is_measured_by_its_tokens(given: Judge | None, decides: str) -> None:
    outcome = score(text("Port Arden"), "She lives in Port Arden", judge=given, decides=decides)
    assert (outcome.value, outcome.by) == (pytest.approx(4 / 7), "token_f1")


@pytest.mark.parametrize("example", [math("3"), math(r"\frac{1}{2}"), text(), choice(), ADD])
def test_a_judge_that_decides_always_takes_the_place_of_verifiers(example: Example) -> None:
    """Of an equal answer, too, and of one that a verifier would call wrong; an empty one it is not shown."""
    given = judge(NO, YES, "hm", "hm")
    equal, other, undecided, empty = score(example, example.ground_truth, "no", "no", "", judge=given, decides="always")
    assert (equal, other) == (Score(0.0, "judge", "another"), Score(1.0, "judge", "the same"))
    assert undecided.cause == "no_verdict"
    assert empty.by == "empty"


def test_token_f1_is_squads() -> None:
    assert normalise("The  Port, of an ARDEN!") == "port of arden"
    assert token_f1("Port Arden", "the Port Arden") == 1.0
    assert token_f1("Holm", "Port Arden") == 0.0
    assert token_f1("the", "a") == 0.0
    assert token_f1("port port", "port") == pytest.approx(2 / 3)


def version(judge: Judge | None = None, decides: str = "text", **changes: Any) -> str:
    return Scorer(SETTINGS.model_copy(update={"judge": decides, **changes}), Sandbox(SANDBOX), judge).version


def test_the_version_names_all_that_a_score_rests_on() -> None:
    plain = version()
    assert plain.startswith("gradeflow-scorer/4+")
    assert plain == version()
    other = Judge([ScriptedClient([], model="another")], JUDGE)
    assert len({plain, version(judge()), version(other), version(number_tolerance=0.01)}) == 4
    assert len({version(judge(), decides) for decides in ("text", "always", "never")}) == 3
    assert version(judge(), "never") == version(None, "never")


DATA = os.environ.get("GRADEFLOW_DATA", "")
with_data = pytest.mark.skipif(not DATA, reason="GRADEFLOW_DATA names no folder with gsm8k/ and humaneval/")


def _lines(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def _swapped(number: str) -> str | None:
    """With the first two neighbouring digits that differ changed round."""
    pair = re.search(r"(\d)(?!\1)(\d)", number)
    return pair and f"{number[: pair.start()]}{pair[2]}{pair[1]}{number[pair.end() :]}"


def _moved(number: str) -> str | None:
    """With the decimal point one place further left."""
    return f"{float(number) / 10!r}" if float(number) else None


WRONG: dict[str, Callable[[str], str | None]] = {
    "one more": lambda number: str(Decimal(number) + 1),
    "another sign": lambda number: str(-Decimal(number)) if Decimal(number) else None,
    "digits swapped": _swapped,
    "point moved": _moved,
    "a digit more": lambda number: f"{number}{'.' if '.' not in number else ''}5",
}
FORMS: dict[str, Callable[[Example, str], str]] = {
    "alone": lambda _, number: number,
    "with its unit": lambda _, number: f"{number} dollars",
    "with a sign of money": lambda _, number: f"${number}",
    "in a sentence": lambda _, number: f"With 3 steps of 4, the answer is {number}.",
    "boxed": lambda _, number: rf"So it is \boxed{{{number}}}, not 7",
    "after the reference's own steps": lambda example, number: (
        f"{example.extra['solution'].rpartition('####')[0]}#### {number}"
    ),
}


@pytest.fixture(scope="module")
def gsm8k_examples() -> list[Example]:
    files = [Path(DATA) / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")]
    examples = [gsm8k.example(row) for file in files for row in _lines(file)]
    assert len(examples) == 8792
    return examples


def _values(pairs: Iterable[tuple[Example, str]]) -> Counter[float]:
    """How often each score is given; numbers need neither sandbox nor judge."""

    async def work() -> Counter[float]:
        scorer = Scorer(SETTINGS, BrokenSandbox(SANDBOX), None)
        outcomes = [await scorer.score(example, answer) for example, answer in pairs]
        return Counter(outcome.value for outcome in outcomes)

    return asyncio.run(work())


@with_data
@pytest.mark.parametrize("form", FORMS)
def test_every_reference_of_gsm8k_is_right(form: str, gsm8k_examples: list[Example]) -> None:
    pairs = ((example, FORMS[form](example, example.ground_truth)) for example in gsm8k_examples)
    assert _values(pairs) == {1.0: 8792}
    assert _values((example, example.extra["solution"]) for example in gsm8k_examples) == {1.0: 8792}


@with_data
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", WRONG)
def test_every_changed_reference_of_gsm8k_is_wrong(wrong: str, form: str, gsm8k_examples: list[Example]) -> None:
    changed = [(example, WRONG[wrong](example.ground_truth)) for example in gsm8k_examples]
    pairs = [(example, FORMS[form](example, number)) for example, number in changed if number is not None]
    assert len(pairs) > 6000
    assert _values(pairs) == {0.0: len(pairs)}


@with_data
def test_humanevals_own_solutions_pass_and_empty_ones_fail() -> None:
    rows = [humaneval.example(row) for row in _lines(Path(DATA) / "humaneval" / "HumanEval.jsonl.gz")]

    async def totals() -> tuple[float, float, float]:
        sandbox = Sandbox(SANDBOX)
        scorer = Scorer(SETTINGS, sandbox, None)

        async def total(answered: Callable[[Example], str]) -> float:
            outcomes = await asyncio.gather(*(scorer.score(row, answered(row)) for row in rows))
            return sum(outcome.value for outcome in outcomes if isinstance(outcome, Score))

        try:
            bodies = await total(lambda row: row.ground_truth)
            whole = await total(lambda row: f"```python\n{row.problem}{row.ground_truth}\n```")
            wrong = await total(lambda row: f"{row.problem}    return None\n")
        finally:
            await sandbox.close()
        return bodies, whole, wrong

    assert _run(totals()) == (164, 164, 0)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)
