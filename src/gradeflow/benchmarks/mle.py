"""Machine learning competitions: a table to learn from, one to predict, and a leaderboard.

The built-in tasks are about pumps that fail within a month. What makes one fail is known here, so the leaderboard is
that of teams which know it too, each less exactly than the one before.
"""

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError, seed_of, seeds
from gradeflow.benchmarks.folders import Layout

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

FOLDERS = Layout("mlebench", imports=("sklearn.metrics",), exact=True)
SEEDS = seeds("builtin-pumps")
TRAIN, TEST, TEAMS = 800, 400, 40
MAKERS = {"Arvo": 0.0, "Bryn": 0.7, "Cato": -0.6, "Dell": 0.2}
MISSING = 0.03
"""Share of the vibrations that nobody measured."""


@dataclass(frozen=True, slots=True)
class Pump:
    """`age` in months, `load` as a share of what it is built for, `vibration` in mm/s; None if not measured."""

    id: int
    age: int
    load: float
    temperature: float
    vibration: float | None
    maker: str
    log_odds: float
    failed: bool

    @classmethod
    def draw(cls, identifier: int, rng: random.Random) -> "Pump":
        age, load, maker = rng.randint(1, 120), round(rng.uniform(0.3, 1.1), 2), rng.choice(sorted(MAKERS))
        temperature = round(rng.gauss(45 + 20 * load, 6), 1)
        vibration = round(rng.lognormvariate(0.5 + 0.005 * age, 0.5), 2)
        strain = 6 * max(load - 0.75, 0) * (1 + age / 60)
        log_odds = -3.6 + 0.01 * age + strain + 0.45 * vibration + 0.04 * (temperature - 60) + MAKERS[maker]
        return cls(
            identifier,
            age,
            load,
            temperature,
            vibration if rng.random() >= MISSING else None,
            maker,
            log_odds,
            failed=rng.random() < 1 / (1 + math.exp(-log_odds)),
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    train: tuple[Pump, ...]
    test: tuple[Pump, ...]
    leaderboard: tuple[float, ...]

    @classmethod
    def make(cls, seed: int) -> "Fleet":
        rng = random.Random(f"pumps/{seed}")
        pumps = tuple(Pump.draw(number, rng) for number in rng.sample(range(10_000, 100_000), TRAIN + TEST))
        train, test = pumps[:TRAIN], pumps[TRAIN:]
        teams = [[pump.log_odds + rng.gauss(0, 0.2 + team / 20) for pump in test] for team in range(TEAMS)]
        failed = [pump.failed for pump in test]
        return cls(train, test, tuple(round(auc(failed, scores), 5) for scores in teams))


def auc(positive: Sequence[bool], scores: Sequence[float]) -> float:
    """The area under the ROC curve: how often a positive one is scored above a negative one; a tie is half."""
    import numpy as np

    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(positive, dtype=bool)
    others = np.sort(values[~truth])
    below, up_to = (np.searchsorted(others, values[truth], side=side) for side in ("left", "right"))
    return float(np.mean(below + up_to) / (2 * len(others)))


def tasks() -> tuple[str, ...]:
    return tuple(SEEDS)


def competition(task_id: str, data_dir: Path) -> Competition:
    fleet = Fleet.make(seed_of(task_id, SEEDS, "mle"))
    folder = data_dir / task_id
    public, private = folder / "prepared" / "public", folder / "prepared" / "private"
    return Competition(
        id=task_id,
        name="Failing pumps",
        description=describe(),
        grader=Grader("auc", grade),
        answers=private / "answers.csv",
        gold_submission=private / "answers.csv",
        sample_submission=public / "sample_submission.csv",
        competition_type="simple",
        prepare_fn=partial(_prepare, fleet),
        raw_dir=folder / "raw",
        private_dir=private,
        public_dir=public,
        leaderboard=fleet.leaderboard,
    )


def describe() -> str:
    return (
        "Predict which pumps fail within a month. train.csv and test.csv have a row for each pump: its `id`, `age` in "
        "months, `load` as a share of what it is built for, `temperature` in degrees Celsius, `vibration` in mm/s "
        "(empty where nobody measured it), and `maker`. In train.csv, `failed` is 1 if it failed and 0 if not.\n\n"
        "Submit a CSV file with the header `id,failed` and a row for each pump of test.csv, in any order, with a "
        "number that is the higher the likelier it fails. The score is the area under the ROC curve."
    )


def grade(submission: "pd.DataFrame", answers: "pd.DataFrame") -> float:
    if list(submission.columns) != ["id", "failed"]:
        raise InvalidSubmissionError("expected the columns id,failed")
    ids = submission["id"].astype(str).str.strip()
    if sorted(ids) != sorted(answers["id"]):
        raise InvalidSubmissionError("expected each id of test.csv once")
    scores = dict(zip(ids, _numbers(submission["failed"]), strict=True))
    return auc([failed == "1" for failed in answers["failed"]], [scores[pump] for pump in answers["id"]])


def _numbers(cells: "pd.Series[str]") -> "NDArray[np.float64]":
    import numpy as np

    try:
        values = np.asarray(cells, dtype=np.float64)
    except ValueError as error:
        raise InvalidSubmissionError(f"failed: {error}") from None
    if not np.isfinite(values).all():
        raise InvalidSubmissionError("failed: expected finite numbers")
    return values


def _prepare(fleet: Fleet, _raw: Path, public: Path, private: Path) -> None:
    columns = ("age", "load", "temperature", "vibration", "maker")
    seen = {
        part: [[getattr(pump, name) for name in columns] for pump in getattr(fleet, part)] for part in ("train", "test")
    }
    private.mkdir(parents=True, exist_ok=True)
    _write(private / "answers.csv", ["id", "failed"], [[pump.id, int(pump.failed)] for pump in fleet.test])
    public.mkdir(parents=True)
    rows = [[pump.id, *row, int(pump.failed)] for pump, row in zip(fleet.train, seen["train"], strict=True)]
    _write(public / "train.csv", ["id", *columns, "failed"], rows)
    rows = [[pump.id, *row] for pump, row in zip(fleet.test, seen["test"], strict=True)]
    _write(public / "test.csv", ["id", *columns], rows)
    _write(public / "sample_submission.csv", ["id", "failed"], [[pump.id, 0.5] for pump in fleet.test])


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
