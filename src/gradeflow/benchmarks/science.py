"""Analysis of measured data, with a result that need not be a table.

The built-in tasks are records of a struck beam: three damped vibrations in noise, of which frequencies and rates of
decay are asked, as a NumPy array in a .npy file.
"""

import csv
import math
import random
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gradeflow.benchmarks import Competition, Grader, InvalidSubmissionError, seed_of, seeds
from gradeflow.benchmarks.folders import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDERS = Layout("sciencebench", imports=("sklearn.metrics",), ranked=False)
SEEDS = seeds("builtin-ringdown")
TOLERANCE = 0.02  # relative
RATE, SECONDS = 200, 10
NOISE = 0.02
BROKEN = (ValueError, TypeError, OverflowError, OSError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError)
"""What NumPy raises for files that are no arrays: their headers are parsed as Python."""
TEAMS = (6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 0, 0, 0)
"""How many of the six numbers each team on the leaderboard has right."""


@dataclass(frozen=True, slots=True)
class Mode:
    """amplitude exp(-decay t) cos(2 pi frequency t + phase), with t in seconds."""

    frequency: float
    decay: float
    amplitude: float
    phase: float

    def at(self, seconds: float) -> float:
        turns = 2 * math.pi * self.frequency * seconds + self.phase
        return self.amplitude * math.exp(-self.decay * seconds) * math.cos(turns)


@dataclass(frozen=True, slots=True)
class Ringdown:
    """Modes from the slowest to the fastest."""

    modes: tuple[Mode, ...]
    seed: int

    @classmethod
    def make(cls, seed: int) -> "Ringdown":
        rng = random.Random(f"ringdown/{seed}")
        bands = ((3.0, 9.0), (13.0, 22.0), (27.0, 40.0))
        modes = (
            Mode(rng.uniform(*band), rng.uniform(0.2, 1.0), rng.uniform(1, 3), rng.uniform(0, 2 * math.pi))
            for band in bands
        )
        return cls(tuple(modes), seed)

    def measured(self) -> Iterator[tuple[float, float]]:
        """Seconds and acceleration."""
        rng = random.Random(f"ringdown noise/{self.seed}")
        for number in range(RATE * SECONDS):
            seconds = number / RATE
            yield seconds, sum(mode.at(seconds) for mode in self.modes) + rng.gauss(0, NOISE)

    def answer(self) -> list[list[float]]:
        return [[mode.frequency, mode.decay] for mode in self.modes]


def tasks() -> tuple[str, ...]:
    return tuple(SEEDS)


def competition(task_id: str, data_dir: Path) -> Competition:
    ringdown = Ringdown.make(seed_of(task_id, SEEDS, "science"))
    folder = data_dir / task_id
    public, private = folder / "prepared" / "public", folder / "prepared" / "private"
    return Competition(
        id=task_id,
        name="Modes of a struck beam",
        description=describe(),
        grader=Grader("ringdown", partial(grade, ringdown), reads_files=True),
        answers=None,
        gold_submission=private / "gold_submission.npy",
        sample_submission=public / "sample_submission.npy",
        competition_type="code",
        prepare_fn=partial(_prepare, ringdown),
        raw_dir=folder / "raw",
        private_dir=private,
        public_dir=public,
        leaderboard=tuple(round(right / 6, 5) for right in TEAMS),
    )


def describe() -> str:
    return (
        "A beam was struck, and an accelerometer on it recorded how it rang: record.csv has the columns `seconds` and "
        f"`acceleration`, {RATE} rows a second for {SECONDS} seconds. What it recorded is the sum of three vibrations "
        "A exp(-d t) cos(2 pi f t + p), with an amplitude A, a rate of decay d in 1/s, a frequency f in Hz and a phase "
        "p of their own, and noise.\n\n"
        "Submit a .npy file with an array of 3 rows and 2 columns: a row for each vibration, from the lowest "
        "frequency to the highest, with f and d. The score is the share of the six numbers that lie within "
        f"{TOLERANCE:.0%} of the true ones."
    )


def grade(ringdown: Ringdown, submission: Path, _answers: Path | None = None) -> float:
    import numpy as np

    found, true = _read(submission), np.asarray(ringdown.answer())
    if found.shape != true.shape or not np.isfinite(found).all():
        raise InvalidSubmissionError(f"expected finite numbers in an array of shape {true.shape}")
    return float(np.mean(np.abs(found - true) <= TOLERANCE * true))


def _read(path: Path) -> "NDArray[np.float64]":
    """An array as it lies in the file: one that is larger than its file, or holds objects, is refused."""
    import numpy as np

    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except BROKEN as error:
        raise InvalidSubmissionError(f"not a .npy file: {error}") from None
    if array.dtype.kind not in "fiu":
        raise InvalidSubmissionError(f"expected numbers, found {array.dtype}")
    return np.array(array, dtype=np.float64)


def _prepare(ringdown: Ringdown, _raw: Path, public: Path, private: Path) -> None:
    import numpy as np

    private.mkdir(parents=True, exist_ok=True)
    np.save(private / "gold_submission.npy", np.asarray(ringdown.answer()))
    public.mkdir(parents=True)
    np.save(public / "sample_submission.npy", np.zeros((3, 2)))
    with (public / "record.csv").open("w", newline="", encoding="utf-8") as file:
        rows = ([f"{seconds:.3f}", f"{value:.5f}"] for seconds, value in ringdown.measured())
        csv.writer(file).writerows([("seconds", "acceleration"), *rows])
