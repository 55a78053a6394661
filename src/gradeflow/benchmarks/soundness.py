"""Whether a task grades what it says: its grader is only ever asked to grade, so that whose it is does not matter."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal, get_args

from gradeflow import digest
from gradeflow.benchmarks import Competition, gold, hints
from gradeflow.benchmarks.report import grade_csv
from gradeflow.errors import GraderError

Check = Literal["files", "gold", "sample", "empty", "parses", "tolerance", "leak", "duplicate", "grader"]
CHECKS: tuple[Check, ...] = get_args(Check)

EVALUATION = re.compile(r"^#+ *(?:evaluation|scoring|submission)\b.*", re.IGNORECASE | re.MULTILINE | re.DOTALL)
SMALL = r"(?P<value>\d*\.\d+(?:e-?\d+)?|\d+(?:\.\d+)?e-\d+|\d+(?:\.\d+)?)"
RELATIVE = re.compile(rf"(?:within|tolerance of|±|\+/-) *{SMALL} ?%", re.IGNORECASE)
ABSOLUTE = re.compile(rf"(?:±|\+/-|within|tolerance(?: of|:|=)?) *{SMALL}(?! ?%|[\d.]*\d ?%)", re.IGNORECASE)
EDGE = Decimal("0.001")
"""How far from the edge of a tolerance, as a share of it, the grader is asked on either side."""
LARGEST, BISECTIONS = 1000, 8
"""How much wider than stated a tolerance is looked for, and how finely."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`unusable` says that right work is not told from wrong work, or needs none: such a task teaches nothing good."""

    task_id: str
    check: Check
    said: str
    unusable: bool = True


@dataclass(frozen=True, slots=True)
class Tolerance:
    """As stated. Where both are, the relative one is for answers below 1 in size."""

    absolute: Decimal | None
    relative: Decimal | None

    def at(self, value: Decimal) -> Decimal | None:
        if self.relative is not None and (self.absolute is None or abs(value) < 1):
            return self.relative * abs(value)
        return self.absolute


@dataclass(frozen=True, slots=True)
class Outcome:
    """`crash` is what the grader said instead of a score."""

    score: float | None = None
    medal: str = ""
    crash: str = ""

    def __str__(self) -> str:
        if self.crash:
            return "crashes its grader"
        if self.score is None:
            return "is invalid"
        return f"scores {self.score:g}" + (f" and wins {self.medal}" if self.medal else "")


class _Grades:
    """What submissions to one competition come to."""

    def __init__(self, competition: Competition, scratch: Path) -> None:
        self.competition = competition
        self._file = scratch / f"submission{competition.sample_submission.suffix}"
        self.sign = -1 if competition.grader.is_lower_better else 1

    def of(self, submission: Path | bytes) -> Outcome:
        if isinstance(submission, bytes):
            self._file.write_bytes(submission)
            submission = self._file
        try:
            report = grade_csv(submission, self.competition)
        except GraderError as error:
            return Outcome(crash=str(error))
        medals = [name for name in ("gold", "silver", "bronze") if getattr(report, f"{name}_medal")]
        return Outcome(report.score, "".join(medals))

    def is_as_good(self, outcome: Outcome, best: float) -> bool:
        """The scores of a report have five decimals."""
        return outcome.score is not None and self.sign * (outcome.score - best) >= -1e-5


def inspect(competition: Competition, scratch: Path) -> list[Finding]:
    """Everything about one task. Its files have to be there; `scratch` is a folder for submissions.

    Raises:
        Fault: the sandbox that graders run in broke down.
    """
    task, grades, file = competition.id, _Grades(competition, scratch), gold.path(competition)
    if file is None:
        said = "names no gold submission and no answers: whether it can be solved is not known"
        return [Finding(task, "gold", said, unusable=False), *_idle(grades, None)]
    if not file.is_file():
        return [Finding(task, "gold", f"its gold submission {file.name} is missing"), *_idle(grades, None)]
    known, outcome = gold.read(file), grades.of(file)
    found = [Finding(task, "leak", said) for said in hints.find(competition, known)]
    if trouble := _gold(grades, outcome, known):
        return [trouble, *found, *_idle(grades, None)]
    assert outcome.score is not None
    found += _idle(grades, outcome.score)
    if known is not None and known.values:
        found += _tolerance(grades, known, outcome.score)
    return found


def _gold(grades: _Grades, outcome: Outcome, known: gold.Gold | None) -> Finding | None:
    competition = grades.competition
    best = (max if grades.sign == 1 else min)(competition.leaderboard)
    if outcome.score is not None and grades.is_as_good(outcome, best):
        return None
    if outcome.crash:
        return Finding(competition.id, "grader", f"the gold submission crashes it: {outcome.crash}")
    if known is not None and known.answer is not None and not re.fullmatch(r"-?\d+(?:\.\d+)?", known.answer):
        return Finding(competition.id, "parses", f"the grader does not read the answer {known.answer!r}: it {outcome}")
    return Finding(competition.id, "gold", f"the gold submission {outcome}; the leaderboard's best is {best:g}")


def _idle(grades: _Grades, best: float | None) -> Iterator[Finding]:
    """The sample submission and empty ones win no medal, nor score as gold does where there are none."""
    competition = grades.competition
    if not (sample := competition.sample_submission).is_file():
        yield Finding(competition.id, "sample", f"its sample submission {sample.name} is missing", unusable=False)
    for check, name, submission in _submissions(sample):
        outcome = grades.of(submission)
        if outcome.crash:
            yield Finding(competition.id, "grader", f"{name} crashes it: {outcome.crash}", unusable=False)
        elif outcome.medal:
            yield Finding(competition.id, check, f"{name} {outcome}")
        elif best is not None and grades.is_as_good(outcome, best):
            yield Finding(competition.id, check, f"{name} {outcome}, as the gold submission does")


def _submissions(sample: Path) -> Iterator[tuple[Check, str, Path | bytes]]:
    if sample.is_file():
        yield "sample", "the untouched sample submission", sample
    yield "empty", "an empty file", b""
    if sample.is_file() and sample.suffix == ".csv":
        lines = sample.read_text(encoding="utf-8", errors="replace").splitlines()
        yield "empty", "a file with the header alone", "\n".join(lines[:1]).encode()
        cells = [line.partition(",") for line in lines[1:]]
        blank = [identifier + "," * (1 + rest.count(",")) for identifier, _, rest in cells]
        yield "empty", "a file with ids alone", "\n".join([*lines[:1], *blank]).encode()


def stated(description: str) -> Tolerance:
    """What the part about grading says: after its heading, or else in the last paragraph."""
    headed = EVALUATION.search(description)
    told = headed[0] if headed else description.strip().split("\n\n")[-1]
    relative, absolute = RELATIVE.search(told), ABSOLUTE.search(told)
    return Tolerance(
        Decimal(absolute["value"]) if absolute else None,
        Decimal(relative["value"]) / 100 if relative else None,
    )


def _tolerance(grades: _Grades, known: gold.Gold, best: float) -> Iterator[Finding]:
    task, told = grades.competition.id, stated(grades.competition.description)

    def moved(by: Decimal, *, absolute: bool) -> bytes:
        return known.rewritten(lambda value: value + by * (1 if absolute else abs(value)))

    def accepts(error: Decimal, *, absolute: bool) -> bool:
        """Whether errors of that size, in both directions, score as gold does."""
        return all(grades.is_as_good(grades.of(moved(sign * error, absolute=absolute)), best) for sign in (1, -1))

    if known.answer is not None and (part := re.match(r"[-+]?\d+(?:\.\d+)?", known.answer)) and part[0] != known.answer:
        whole, shorter = gold.number(known.answer), Decimal(part[0])
        if whole != shorter and grades.is_as_good(grades.of(known.rewritten(part[0])), best):
            yield Finding(task, "parses", f"the grader takes {part[0]} for the answer {known.answer}")
            return
    value = known.values[0]
    is_relative = known.answer is None
    allowed = told.relative if is_relative else told.at(value)
    if not allowed or not value or (not is_relative and math.ulp(float(value)) > float(allowed * EDGE)):
        return  # an error of that size is none, or too small for the grader's numbers
    if not accepts(allowed * (1 - EDGE), absolute=not is_relative):
        yield Finding(task, "tolerance", f"says {_said(told)}, but refuses an error of less")
    elif accepts(allowed * (1 + EDGE), absolute=not is_relative):
        accepted, refused = allowed, 2 * allowed
        while refused < LARGEST * allowed and accepts(refused, absolute=not is_relative):
            accepted, refused = refused, 2 * refused
        for _ in range(BISECTIONS):
            middle = (accepted + refused) / 2
            accepted, refused = (middle, refused) if accepts(middle, absolute=not is_relative) else (accepted, middle)
        size = f"{accepted:.1%}" if is_relative else f"{float(accepted):.2g}"
        yield Finding(task, "tolerance", f"says {_said(told)}, but accepts an error of {size}", unusable=False)
    if not is_relative and told.relative is None and abs(value) < 1:
        share = f"{allowed / abs(value):.1%}"
        said = (
            f"the tolerance of {_short(allowed)} is {share} of the answer {known.answer}; below 1 it should be relative"
        )
        yield Finding(task, "tolerance", said, unusable=allowed >= abs(value))


def _said(told: Tolerance) -> str:
    parts = [f"±{_short(told.absolute)}"] if told.absolute is not None else []
    return " or ".join([*parts, *([f"±{_short(100 * told.relative)} %"] if told.relative is not None else [])])


def _short(value: Decimal) -> str:
    return f"{value.normalize():f}" if value > Decimal("1e-6") else f"{value:.3g}"


def question(competition: Competition) -> str:
    """A description without its heading, in which the task's id may stand."""
    lines = competition.description.strip().splitlines()
    body = lines[1:] if lines and lines[0].startswith("#") else lines
    return "\n".join(body).replace(competition.id, "").strip()


def normal(text: str) -> str:
    """Letters and digits alone: LaTeX, punctuation, case and spaces do not make another question."""
    return " ".join(re.findall(r"\w+", re.sub(r"\\(?:mathrm|text|left|right|[,;! ])", " ", text).lower()))


def duplicates(competitions: Iterable[Competition]) -> Iterator[Finding]:
    """Of equal tasks the first is good, and the others are named."""
    groups: dict[str, list[Competition]] = {}
    for competition in competitions:
        groups.setdefault(normal(question(competition)), []).append(competition)
    for group in groups.values():
        firsts: dict[str, Competition] = {}
        for competition in group if len(group) > 1 else ():
            first = firsts.setdefault(_data(competition), competition)
            if first is not competition:
                yield from _alike(competition, first)


def _alike(competition: Competition, first: Competition) -> Iterator[Finding]:
    same = question(competition) == question(first)
    said = f"has the question of {first.id}" + ("" if same else ", but for case, spaces and signs")
    one, other = (_answer(each) for each in (competition, first))
    if one != other:
        said += f", and the answer {one} instead of {other}"
        again = f"{competition.id} has its question, and the answer {one} instead of {other}"
        yield Finding(first.id, "duplicate", again, unusable=False)
    yield Finding(competition.id, "duplicate", said)


def _answer(competition: Competition) -> str | None:
    file = gold.path(competition)
    known = gold.read(file) if file and file.is_file() else None
    return known.answer if known else None


def _data(competition: Competition) -> str:
    """A digest of what an agent is given besides the question."""
    files = (path for path in sorted(competition.public_dir.rglob("*")) if path.is_file())
    told = {"problem.json", competition.sample_submission.name}
    return digest.of_json([[path.name, digest.of_file(path)] for path in files if path.name not in told])
