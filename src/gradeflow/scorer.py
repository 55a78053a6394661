"""The one scorer: reward, validation and evaluation call the same object, and its version is on every run.

Numbers, choices and unit tests are verified; free text goes to the judge, or is measured by token F1. Where
`scorer.judge` says `always`, the judge decides all.

Unit tests run in the answer's own interpreter. An answer that ends it early, or reports a result of its own,
fails; one whose objects equal everything, or that searches the frames of the interpreter, may still pass.
"""

import ast
import re
import secrets
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from gradeflow import digest, params
from gradeflow.errors import Fault, GraderError
from gradeflow.expressions import Expressions
from gradeflow.judge import Judge
from gradeflow.sandbox import Execution, Sandbox
from gradeflow.trace import Trace
from gradeflow.types import Abstained, Example, Outcome, Score

NAME = "gradeflow-scorer/4"

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    r"(?<![\^_0-9])(?<!\^-)(?<!\^\{)(?<![0-9]\.)"  # no exponents, no indices, no tails of numbers
    rf"(?P<minus>(?<![\w)\]}}])[-\u2212])?\\?\$?(?P<digits>{_DIGITS})(?P<power>[eE][-+]?[0-9]{{1,4}}(?![0-9]))?"
)
_RATIO = re.compile(r"\$?\s*(-?[0-9]{1,300})\s*/\s*([0-9]{0,300}[1-9][0-9]{0,9})\s*\$?")
_MOST_DIGITS = 300  # Python refuses to read integers of some thousand
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FENCED = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_UNIT_TESTS = """
import harness

def _grade(inputs, hand_over):
    import builtins, sys
    secret, entry_point, parts = inputs.pop("secret"), inputs.pop("entry_point"), inputs.pop("parts")
    sources, given, test = ([compile(text, f"{name}.py", "exec") for text in texts] for name, texts in parts)
    run, named = exec, vars(builtins)
    before = named.copy()
    answer, tests = type(sys)("answer"), type(sys)("tests")
    sys.modules["answer"] = answer
    for source in sources:
        run(source, answer.__dict__)
    named.update(before)
    candidate = getattr(answer, entry_point)
    sys.modules["tests"] = tests
    for source in given:
        run(source, tests.__dict__)
    setattr(tests, entry_point, candidate)
    for source in test:
        run(source, tests.__dict__)
    tests.check(candidate)
    hand_over(secret)

_grade(harness.inputs, harness.result)
"""


class Scorer:
    def __init__(self, settings: params.Scorer, sandbox: Sandbox, judge: Judge | None) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._expressions = Expressions(sandbox)
        self._judge = judge if settings.judge != "never" else None
        rests_on = {"settings": settings.model_dump(mode="json"), "judge": self._judge and self._judge.version}
        self.version = f"{NAME}+{digest.of_json(rests_on)[:12]}"

    async def score(
        self, example: Example, answer: str | None, trace: Trace | None = None, attempt: int = 0
    ) -> Outcome:
        """The answer's score; Abstained when a fault stood in the way. No answer is the policy's own zero.

        How it came about, down to the judge's calls, is in `trace`. After an abstention another `attempt` asks the
        judge anew: the replies of the first are kept.
        """
        outcome: Outcome
        inputs = {"answer": answer, "reference": example.ground_truth}
        with (trace or Trace()).span("score", "score", inputs) as span:
            try:
                outcome = await self._score(example, answer or "", span.trace, attempt)
            except Fault as fault:
                outcome = Abstained(fault.cause, str(fault))
            span.outputs = asdict(outcome)
        return outcome

    async def _score(self, example: Example, answer: str, trace: Trace, attempt: int) -> Score:
        if not answer.strip():
            return Score(0.0, "empty", "no answer")
        if self._judge is not None and self._settings.judge == "always":
            return await self._judge_says(self._judge, example, answer, trace, attempt)
        match example.kind:
            case "math":
                return await self._math(example, answer, trace)
            case "choice":
                return _choice(example, answer)
            case "code":
                return await self._code(example, answer, trace)
            case "text":
                return await self._text(example, answer, trace, attempt)
            case "task":
                raise ValueError(f"{example.id}: a benchmark's task has a grader of its own")

    async def _math(self, example: Example, answer: str, trace: Trace) -> Score:
        reference = plain_number(example.ground_truth)
        if reference is None:
            return await self._expression(example.ground_truth, answer, trace)
        found = last_number(answer)
        if found is None:
            return Score(0.0, "number", "no number in the answer")
        equal = abs(found - reference) <= Fraction(self._settings.number_tolerance) * abs(reference)
        return Score(float(equal), "number")

    async def _expression(self, reference: str, answer: str, trace: Trace) -> Score:
        if reference.strip() == answer.strip():
            return Score(1.0, "math")
        with trace.span("sandbox", "math_verify", {"reference": reference, "answer": answer}) as span:
            comparison = await self._expressions.compare(reference, answer)
            span.outputs = asdict(comparison)
        if comparison.limit:
            return Score(0.0, "math", f"not comparable: {comparison.limit}")
        if not comparison.readable:
            raise GraderError(f"math-verify cannot read the reference {reference!r}", cause="reference")
        return Score(float(comparison.equal), "math")

    async def _code(self, example: Example, answer: str, trace: Trace) -> Score:
        secret = secrets.token_hex(16)
        tests = _unit_tests(example, answer)
        given = {"inputs": {**tests, "secret": secret}, "wall_s": self._settings.tests_wall_s}
        execution = await trace.run(self._sandbox, _UNIT_TESTS, name="unit_tests", shown=tests, **given)
        if execution.status == "ok" and execution.value == secret:
            return Score(1.0, "unit_tests")
        return Score(0.0, "unit_tests", _why(execution))

    async def _text(self, example: Example, answer: str, trace: Trace, attempt: int) -> Score:
        references = [example.ground_truth, *example.extra.get("alternatives", ())]
        if any(normalise(answer) == normalise(reference) != "" for reference in references):
            return Score(1.0, "exact")
        if self._judge is None:
            return Score(max(token_f1(answer, reference) for reference in references), "token_f1")
        return await self._judge_says(self._judge, example, answer, trace, attempt)

    @staticmethod
    async def _judge_says(judge: Judge, example: Example, answer: str, trace: Trace, attempt: int) -> Score:
        asked = example.question, example.ground_truth, answer, example.source
        verdict = await judge.verdict(*asked, first_seed=attempt * judge.most_seeds, trace=trace)
        return Score(float(verdict.correct), "judge", verdict.reason)


def plain_number(text: str) -> Fraction | None:
    """The number that a reference consists of, `$1,234.50` and `12 %` included; None where there is more."""
    trimmed = text.strip().removesuffix(".").removesuffix("%").rstrip()
    found = _NUMBER.fullmatch(trimmed)
    return _value(found) if found else None


def last_number(text: str) -> Fraction | None:
    """The number of an answer: after GSM8K's `####`, in the last LaTeX box, or the last of all."""
    text = text.rpartition("####")[2]
    if boxed := _BOXED.findall(text):
        text = boxed[-1]
    if ratio := _RATIO.fullmatch(text.strip()):
        return Fraction(int(ratio[1]), int(ratio[2]))
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > _MOST_DIGITS:
        return None
    size = Fraction(found["digits"].replace(",", "") + (found["power"] or ""))
    return -size if found["minus"] else size


def _choice(example: Example, answer: str) -> Score:
    texts = choices(example)
    if example.ground_truth not in texts:
        labels = ", ".join(texts)
        raise GraderError(f"{example.id}: ground_truth {example.ground_truth!r} is none of {labels}", cause="reference")
    label = chosen(answer, texts)
    if label is None:
        return Score(0.0, "choice", "no single choice in the answer")
    return Score(float(label == example.ground_truth), "choice", f"chose {label}")


def choices(example: Example) -> dict[str, str]:
    """The text of each choice by its label."""
    found = example.extra["choices"]
    if isinstance(found, Mapping):
        return dict(zip(found["label"], found["text"], strict=True))
    return dict(zip(string.ascii_uppercase, found, strict=False))


def chosen(answer: str, texts: Mapping[str, str]) -> str | None:
    """The label that an answer settles on: alone, by its text, after `answer is`, or as in `B. text`."""
    if boxed := _BOXED.findall(answer):
        answer = boxed[-1]
    plain = re.sub(r"[*_`$]", "", answer).strip()
    if (alone := plain.strip(" ().:[]\"'").upper()) in texts:
        return alone
    labels = "|".join(map(re.escape, texts))
    forms = (
        rf"(?i:\b(?:answer|option|choice)(?:\s+is)?)\s*:?\s*[(\[]?({labels})\b",
        rf"(?:^|(?<=\s))[(\[]?({labels})[)\].:]+(?=\s|$)",
    )
    said = normalise(plain)
    by_text = [label for label, text in texts.items() if normalise(text) == said != ""]
    for found in (by_text, *(re.findall(form, plain) for form in forms)):
        if found:
            return found[0] if len(set(found)) == 1 else None
    return None


def _unit_tests(example: Example, answer: str) -> dict[str, Any]:
    """HumanEval's parts: what was given (imports, helpers, signature), the answer, and `check(candidate)`."""
    test, entry_point = example.extra["test"], example.extra.get("entry_point")
    if not isinstance(entry_point, str) or not _parses(test) or "def check(" not in test:
        raise GraderError(f"{example.id}: its unit tests are no Python with check() and entry_point", cause="tests")
    given = str(example.extra.get("prompt", ""))
    code = _unfenced(answer, entry_point)
    if given and code[:1] in {" ", "\t"}:
        sources = [f"{given.rstrip()}\n{code}"]
    else:
        sources = [given, code] if _parses(given) else [code]
    parts = [("answer", sources), ("tests", [given if _parses(given) else ""]), ("tests", [test])]
    return {"parts": parts, "entry_point": entry_point}


def _unfenced(answer: str, entry_point: str) -> str:
    """The fenced block that defines the function, else the first, else the answer; indents are kept."""
    blocks: list[str] = [block.strip("\n") for block in _FENCED.findall(answer)]
    defining = [block for block in blocks if f"def {entry_point}" in block]
    return (defining or blocks or [answer.strip("\n")])[0]


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _why(execution: Execution) -> str:
    match execution.status:
        case "ok":
            return "it ended before its tests did"
        case "limit":
            return execution.error
        case "failed":
            return f"{execution.error_type}: {execution.error}"


def normalise(text: str) -> str:
    """SQuAD's form for comparison: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(answer: str, reference: str) -> float:
    given, wanted = normalise(answer).split(), normalise(reference).split()
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted)) if common else 0.0
