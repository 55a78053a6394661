"""The built-in analysis: a record, and an array in a file that nobody may trust."""

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradeflow.benchmarks import Competition, InvalidSubmissionError, science
from gradeflow.benchmarks.report import grade_csv
from gradeflow.benchmarks.science import NOISE, RATE, SECONDS, TOLERANCE, Mode, Ringdown, grade

RINGDOWN = Ringdown.make(0)
TRUE = np.asarray(RINGDOWN.answer())


@pytest.fixture
def ringdown(tmp_path: Path) -> Competition:
    made = science.competition("builtin-ringdown", tmp_path)
    made.prepare()
    return made


def saved(array: object, folder: Path) -> Path:
    np.save(folder / "submission.npy", array, allow_pickle=True)
    return folder / "submission.npy"


def npy(content: bytes, folder: Path) -> Path:
    path = folder / "submission.npy"
    path.write_bytes(content)
    return path


def header(shape: str, dtype: str = "<f8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def test_the_score_is_the_share_of_numbers_that_are_right(tmp_path: Path) -> None:
    for wrong in range(7):
        array = TRUE.copy()
        array.reshape(-1)[:wrong] = 0
        assert grade(RINGDOWN, saved(array, tmp_path)) == pytest.approx((6 - wrong) / 6)


def test_the_stated_tolerance_is_the_graders(ringdown: Competition, tmp_path: Path) -> None:
    assert f"within {TOLERANCE:.0%} of the true ones" in ringdown.description
    for factor, score in ((0.9801, 1.0), (1.0199, 1.0), (0.9799, 0.0), (1.0201, 0.0)):
        assert grade(RINGDOWN, saved(TRUE * factor, tmp_path)) == score


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f8"])
def test_any_kind_of_number_will_do(dtype: str, tmp_path: Path) -> None:
    assert grade(RINGDOWN, saved(np.asfortranarray(TRUE.astype(dtype)), tmp_path)) == 1.0


@pytest.mark.parametrize(
    "array",
    [
        TRUE.T,
        TRUE.ravel(),
        TRUE[:2],
        np.full((3, 2), np.nan),
        np.full((3, 2), np.inf),
        TRUE.astype(complex),
        TRUE.astype(str),
        TRUE.astype(object),
        np.zeros((0, 2)),
        np.zeros((3, 2), dtype=[("a", "f8")]),
    ],
)
def test_what_is_no_array_of_six_numbers_is_invalid(array: object, ringdown: Competition, tmp_path: Path) -> None:
    assert grade_csv(saved(array, tmp_path), ringdown).valid_submission is False


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"f,d\n1,2\n",
        header("(3, 2)"),
        header("(3, 2)") + TRUE.tobytes()[:-1],
        header("(1000000000000, 2)") + TRUE.tobytes(),
        header("(999999999999999999999999, 2)"),
        header("(-3, 2)") + TRUE.tobytes(),
        header("(3, 2)", "|O") + TRUE.tobytes(),
        header("__import__('os')"),
        header("{"),
        header("(" * 500),
        header("-" * 9000 + "1"),
        b"\x80\x04\x95",
    ],
)
def test_a_file_that_lies_about_itself_is_invalid(content: bytes, ringdown: Competition, tmp_path: Path) -> None:
    assert grade_csv(npy(content, tmp_path), ringdown).valid_submission is False


def test_an_archive_of_arrays_is_no_array(ringdown: Competition, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.npy", saved(TRUE, tmp_path).read_bytes())
    assert grade_csv(npy(buffer.getvalue(), tmp_path), ringdown).valid_submission is False


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 128), st.booleans())
def test_no_bytes_make_the_grader_crash(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    whole = header("(3, 2)") + TRUE.tobytes()
    changed = whole[:at] + noise + (b"" if cut else whole[at + len(noise) :])
    try:
        score = grade(RINGDOWN, npy(changed, folder))
    except InvalidSubmissionError:
        return
    assert 0 <= score <= 1


def test_the_record_is_the_sum_of_the_modes_and_noise(ringdown: Competition) -> None:
    table = np.loadtxt(ringdown.public_dir / "record.csv", delimiter=",", skiprows=1)
    assert table.shape == (RATE * SECONDS, 2)
    clean = np.array([sum(mode.at(seconds) for mode in RINGDOWN.modes) for seconds in table[:, 0]])
    noise = table[:, 1] - clean
    assert np.std(noise) == pytest.approx(NOISE, rel=0.1)
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.1


def test_a_mode_swings_and_dies_away() -> None:
    mode = Mode(frequency=2.0, decay=0.5, amplitude=3.0, phase=0.0)
    assert mode.at(0) == 3.0
    assert mode.at(0.25) == pytest.approx(-3 * np.exp(-0.125))
    assert mode.at(2.0) == pytest.approx(3 * np.exp(-1))


def test_the_peak_of_the_spectrum_alone_does_not_tell_the_decay(ringdown: Competition, tmp_path: Path) -> None:
    table = np.loadtxt(ringdown.public_dir / "record.csv", delimiter=",", skiprows=1)
    size, frequencies = np.abs(np.fft.rfft(table[:, 1])), np.fft.rfftfreq(len(table), 1 / RATE)
    bands = [(2, 11), (11, 25), (25, 45)]
    peaks = [max((s, f) for s, f in zip(size, frequencies, strict=True) if low < f < high)[1] for low, high in bands]
    report = grade_csv(saved(np.column_stack([peaks, [0.5] * 3]), tmp_path), ringdown)
    assert report.score is not None
    assert 0 < report.score < 1
    assert not report.gold_medal


def test_leaderboard_scores_can_be_reached_exactly(ringdown: Competition) -> None:
    assert json.dumps(sorted(set(ringdown.leaderboard))) == "[0.0, 0.16667, 0.33333, 0.5, 0.66667, 0.83333, 1.0]"
