"""What graders and preparers take from a package's `utils`, and from MLE-bench's `competitions.utils`."""

import json
import logging
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z")


class InvalidSubmissionError(Exception):
    """The submission cannot be graded, and that is the submission's doing."""


def get_logger(name: str, level: int = logging.INFO, filename: Path | None = None) -> logging.Logger:
    logging.basicConfig(level=level, filename=filename)
    return logging.getLogger(name)


def get_timestamp() -> str:
    return time.strftime("%Y-%m-%dT%H-%M-%S-%Z", time.gmtime())


def read_csv(*args: Any, **kwargs: Any) -> Any:
    """pandas.read_csv with numbers read exactly; an empty file is an empty table."""
    try:
        return pd.read_csv(*args, **{"float_precision": "round_trip", **kwargs})
    except pd.errors.EmptyDataError:
        return pd.DataFrame()


def read_jsonl(file_path: str | Path, skip_commented_out_lines: bool = False) -> list[Any]:  # noqa: FBT001, FBT002 - as callers pass it
    lines = map(str.strip, Path(file_path).read_text(encoding="utf-8").splitlines())
    if skip_commented_out_lines:
        lines = (line for line in lines if line and not line.startswith(("#", "//")))  # type: ignore[assignment]
    return [json.loads(line) for line in lines]


def load_answers(path_to_answers: Path) -> Any:
    if path_to_answers.suffix == ".csv":
        return read_csv(path_to_answers)
    if path_to_answers.suffix == ".jsonl":
        return read_jsonl(path_to_answers)
    raise ValueError(f"{path_to_answers}: expected .csv or .jsonl")


def load_yaml(fpath: Path) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(fpath)


def is_empty(dir: Path) -> bool:  # noqa: A002 - as callers name it
    return not any(dir.iterdir())


def is_compressed(fpath: Path) -> bool:
    return fpath.suffix in ARCHIVES


def extract(compressed: Path, dst: Path, recursive: bool = False) -> None:  # noqa: FBT001, FBT002 - as callers pass it
    """Unpack a .zip or .7z; `recursive` unpacks the archives that came out of it as well."""
    before = set(dst.iterdir()) if dst.is_dir() else set()
    if compressed.suffix == ".7z":
        import py7zr

        with py7zr.SevenZipFile(compressed) as archive:
            archive.extractall(dst)
    elif compressed.suffix == ".zip":
        with zipfile.ZipFile(compressed) as archive:
            archive.extractall(dst)
    else:
        raise NotImplementedError(f"{compressed.name}: only .zip and .7z are unpacked")
    if recursive:
        for inner in sorted(set(dst.iterdir()) - before):
            if is_compressed(inner):
                extract(inner, inner.parent, recursive=True)


def compress(src: Path, compressed: Path, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - as callers pass it
    """Pack a folder's files into a .zip or .7z."""
    if compressed.exists() and not exist_ok:
        raise AssertionError(f"{compressed} exists already")
    files = sorted(path for path in src.rglob("*") if path.is_file())
    if compressed.suffix == ".zip":
        with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.relative_to(src))
    elif compressed.suffix == ".7z":
        import py7zr

        with py7zr.SevenZipFile(compressed, "w") as archive:
            for path in files:
                archive.write(path, str(path.relative_to(src)))
    else:
        raise NotImplementedError(f"{compressed.name}: only .zip and .7z are packed")


def df_to_one_hot(df: Any, id_column: str, target_column: str, classes: Sequence[str]) -> Any:
    """A column for each class, 1 in the row's own."""
    table = pd.DataFrame(0, index=df.index, columns=[id_column, *classes])
    table[id_column] = df[id_column]
    for row, own in df[target_column].items():
        table.loc[row, own] = 1
    return table


def is_one_hot_encoded(xs: Any) -> bool:
    if xs.ndim != 2:
        raise AssertionError(f"expected two dimensions, found {xs.ndim}")
    return bool(np.isin(xs, (0, 1)).all() and np.allclose(xs.sum(axis=-1), 1))


def one_hot_dfs_to_log_loss_inputs(
    submission_one_hot: Any,
    answers_one_hot: Any,
    id_column: str = "id",
    apply_softmax: bool = True,  # noqa: FBT001, FBT002 - as callers pass it
) -> dict[str, Any]:
    """`y_true` and `y_pred` for log_loss: the answers' columns, in the order of ids."""
    if missing := set(answers_one_hot.columns) - set(submission_one_hot.columns):
        raise InvalidSubmissionError(f"columns are missing: {missing}")
    if id_column not in submission_one_hot.columns:
        raise InvalidSubmissionError(f"column {id_column} is missing")
    submission, answers = (
        table[list(answers_one_hot.columns)].sort_values(by=id_column).reset_index(drop=True)
        for table in (submission_one_hot, answers_one_hot)
    )
    if submission[id_column].tolist() != answers[id_column].tolist():
        raise AssertionError("submission and answers have different ids")
    y_true, y_pred = (table.drop(columns=[id_column]).to_numpy() for table in (answers, submission))
    if apply_softmax and not is_one_hot_encoded(y_pred):
        from scipy.special import softmax

        y_pred = softmax(y_pred, axis=-1)
    return {"y_true": y_true, "y_pred": y_pred}


def prepare_for_accuracy_metric(submission: Any, answers: Any, target_column: str, id_column: str) -> dict[str, Any]:
    _require(answers, (target_column, id_column), AssertionError)
    if len(submission) != len(answers):
        raise InvalidSubmissionError(f"{len(submission)} rows; expected {len(answers)}")
    _require(submission, (target_column, id_column), InvalidSubmissionError)
    submission, answers = _by_id(submission, answers, id_column)
    return {"y_true": answers[target_column].to_numpy(), "y_pred": submission[target_column].to_numpy()}


def prepare_for_auroc_metric(submission: Any, answers: Any, id_col: str, target_col: str) -> dict[str, Any]:
    """`y_true` and `y_score` for roc_auc_score; scores are probabilities."""
    _require(answers, (id_col, target_col), AssertionError)
    _require(submission, (id_col, target_col), InvalidSubmissionError)
    if len(submission) != len(answers):
        raise InvalidSubmissionError(f"{len(submission)} rows; expected {len(answers)}")
    try:
        pd.to_numeric(submission[target_col])
    except ValueError:
        raise InvalidSubmissionError(f"{target_col} must be numbers") from None
    if submission[target_col].min() < 0 or submission[target_col].max() > 1:
        raise InvalidSubmissionError(f"{target_col} must be probabilities, from 0 to 1")
    submission, answers = _by_id(submission, answers, id_col)
    return {"y_true": answers[target_col].to_numpy(), "y_score": submission[target_col].to_numpy()}


def _require(table: Any, columns: Sequence[str], error: type[Exception]) -> None:
    for column in columns:
        if column not in table.columns:
            raise error(f"column {column} is missing")


def _by_id(submission: Any, answers: Any, id_column: str) -> tuple[Any, Any]:
    submission, answers = (table.sort_values(id_column) for table in (submission, answers))
    if (submission[id_column].values != answers[id_column].values).any():
        raise InvalidSubmissionError(f"the values of {id_column} are not those of the answers")
    return submission, answers


def rle_decode(rle_string: str, height: int, width: int) -> Any:
    """A mask from runs of `start length`, counted from 1 down the columns."""
    numbers = list(map(int, rle_string.split()))
    starts, lengths = numbers[::2], numbers[1::2]
    if starts != sorted(starts) or any(start <= 0 for start in starts):
        raise AssertionError("runs must start at positive places, in order")
    mask = np.zeros(height * width, dtype=bool)
    for start, length in zip(starts, lengths, strict=True):
        run = slice(start - 1, start - 1 + length)
        if mask[run].any():
            raise AssertionError("runs must not overlap")
        mask[run] = True
    return mask.reshape((width, height)).T


def rle_encode(x: Any, fg_val: Any = 1) -> list[int]:
    """The runs of a mask as [start, length, start, length, ...], counted from 1 down the columns."""
    places = np.flatnonzero(x.T.flatten() == fg_val)
    edges = np.flatnonzero(np.diff(places) > 1) + 1
    runs = np.split(places, edges) if len(places) else []
    return [int(number) for run in runs for number in (run[0] + 1, len(run))]


def rles_to_masks(rl_encodings: Sequence[str], image_heights: Sequence[int], image_widths: Sequence[int]) -> list[Any]:
    sizes = zip(rl_encodings, image_heights, image_widths, strict=False)
    return [rle_decode(encoding, height=height, width=width) for encoding, height, width in sizes]
