"""A submission's report: its score, and the medal it would have won on the competition's leaderboard."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError
from gradeflow.errors import GradeflowError, GraderError

if TYPE_CHECKING:
    import pandas as pd

Medal = Literal["gold", "silver", "bronze"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Scores that win a medal; `median` has to be beaten."""

    gold: float
    silver: float
    bronze: float
    median: float


@dataclass(frozen=True, slots=True)
class Positions:
    """Last places on a leaderboard, counted from 1, that win a medal."""

    gold: int
    silver: int
    bronze: int


@dataclass(frozen=True, slots=True)
class CompetitionReport:
    """A score of None says that there was no valid submission; it is neither good nor bad."""

    competition_id: str
    score: float | None
    gold_threshold: float
    silver_threshold: float
    bronze_threshold: float
    median_threshold: float
    any_medal: bool
    gold_medal: bool
    silver_medal: bool
    bronze_medal: bool
    above_median: bool
    submission_exists: bool
    valid_submission: bool
    is_lower_better: bool
    created_at: datetime
    submission_path: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"created_at": self.created_at.isoformat().replace("+00:00", "Z")}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "CompetitionReport":
        values = {name: row[name] for name in (item.name for item in fields(cls))}
        return cls(**values | {"created_at": datetime.fromisoformat(row["created_at"])})


def positions(teams: int) -> Positions:
    """Kaggle's medal table."""
    tenth, fifth, two_fifths = (max(1, teams * share // 100) for share in (10, 20, 40))
    if teams < 100:
        return Positions(tenth, fifth, two_fifths)
    if teams < 250:
        return Positions(10, fifth, two_fifths)
    gold = 10 + teams * 2 // 1000
    if teams < 1000:
        return Positions(gold, 50, 100)
    return Positions(gold, max(1, teams * 5 // 100), tenth)


def thresholds(leaderboard: Sequence[float], *, lower_is_better: bool) -> Thresholds:
    ranked = sorted(leaderboard, reverse=not lower_is_better)
    last = positions(len(ranked))
    gold, silver, bronze = (ranked[position - 1] for position in (last.gold, last.silver, last.bronze))
    return Thresholds(gold, silver, bronze, statistics.median(ranked))


def medal(score: float | None, limits: Thresholds, *, lower_is_better: bool) -> Medal | None:
    """The best medal that the score reaches; without a score there is none."""
    if score is None:
        return None
    sign = -1 if lower_is_better else 1
    if sign * score >= sign * limits.gold:
        return "gold"
    if sign * score >= sign * limits.silver:
        return "silver"
    return "bronze" if sign * score >= sign * limits.bronze else None


def grade_csv(path: Path | None, competition: Competition) -> CompetitionReport:
    """Grade one file. A missing or invalid one has no score, which is not a score of 0.

    Raises:
        GraderError: the grader crashed, or gave something that is no finite number.
    """
    return explain(path, competition)[0]


def explain(path: Path | None, competition: Competition) -> tuple[CompetitionReport, str]:
    """As `grade_csv`, and why the file is invalid where it is."""
    exists, score, why = path is not None and path.is_file(), None, ""
    try:
        score = _score(path, competition) if path is not None and exists else None
    except InvalidSubmissionError as invalid:
        why = str(invalid)
    lower = competition.grader.is_lower_better
    limits = thresholds(competition.leaderboard, lower_is_better=lower)
    won = medal(score, limits, lower_is_better=lower) if competition.ranked else None
    beaten = score is not None and (score < limits.median if lower else score > limits.median)
    report = CompetitionReport(
        competition_id=competition.id,
        score=score,
        gold_threshold=limits.gold,
        silver_threshold=limits.silver,
        bronze_threshold=limits.bronze,
        median_threshold=limits.median,
        any_medal=won is not None,
        gold_medal=won == "gold",
        silver_medal=won == "silver",
        bronze_medal=won == "bronze",
        above_median=beaten and competition.ranked,
        submission_exists=exists,
        valid_submission=score is not None,
        is_lower_better=lower,
        created_at=datetime.now(UTC),
        submission_path=str(path) if path is not None else "",
    )
    return report, why


def _score(path: Path, competition: Competition) -> float:
    if competition.grader.reads_files:
        kinds = {known.suffix.lower() for known in (competition.sample_submission, competition.answers) if known}
        if path.suffix.lower() not in (kinds := kinds | {".csv"}):
            raise InvalidSubmissionError(f"{path.name}: expected a name in {' or '.join(sorted(kinds))}")
        return _graded(competition.grader, competition.id, path, competition.answers)
    try:
        submission = _read(path.read_bytes())
    except ValueError as error:  # what pandas raises for bytes that are no CSV in UTF-8
        raise InvalidSubmissionError(f"no CSV in UTF-8: {error}") from None
    answers = _read(competition.answers.read_bytes()) if competition.answers else None
    return _graded(competition.grader, competition.id, submission, answers)


def _graded(grader: Grader, task_id: str, submission: Any, answers: Any) -> float:
    try:
        score = float(grader.grade_fn(submission, answers))
    except (InvalidSubmissionError, GradeflowError):
        raise
    except Exception as error:
        message = f"{task_id}: grader {grader.name} crashed: {type(error).__name__}: {error}"
        raise GraderError(message, cause="grader_crashed") from error
    if not math.isfinite(score):
        raise GraderError(f"{task_id}: grader {grader.name} gave {score}", cause="grader_no_number")
    return round(score, 5)


def _read(content: bytes) -> "pd.DataFrame":
    import pandas as pd

    return pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
