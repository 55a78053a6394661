"""What stands in for the helpers that graders import: the same values, the same refusals."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradeflow.benchmarks.third_party.stand_ins import metrics, utils
from gradeflow.benchmarks.third_party.stand_ins.utils import InvalidSubmissionError

MASKS = arrays(bool, st.tuples(st.integers(1, 6), st.integers(1, 6)))


@given(mask=MASKS)
def test_a_mask_survives_its_runs(mask: Any) -> None:
    runs = utils.rle_encode(mask.astype(int))
    assert all(isinstance(number, int) for number in runs)
    assert (utils.rle_decode(" ".join(map(str, runs)), *mask.shape) == mask).all()


def test_runs_go_down_the_columns_and_count_from_one() -> None:
    mask = utils.rle_decode("2 2", height=2, width=2)
    assert mask.tolist() == [[False, True], [True, False]]
    assert utils.rles_to_masks(["", "1 1"], [1, 1], [2, 2])[1].tolist() == [[True, False]]


@pytest.mark.parametrize("runs", ["3 1 1 1", "0 2", "1 3 2 1"])
def test_runs_in_disorder_are_refused(runs: str) -> None:
    with pytest.raises(AssertionError):
        utils.rle_decode(runs, 3, 3)


@given(first=MASKS, data=st.data())
def test_dice_is_twice_the_overlap_over_both_sizes(first: Any, data: st.DataObject) -> None:
    second = data.draw(arrays(bool, first.shape))
    found = metrics.dice_coefficient(first, second, both_empty_value=-1.0)
    size = int(first.sum() + second.sum())
    assert found == pytest.approx(2 * int((first & second).sum()) / size if size else -1.0)


def test_masks_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match="unequal shapes"):
        metrics.dice_coefficient(np.ones((2, 2)), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("actual", "predicted", "k", "score"),
    [
        ({1}, [1, 2, 3], 3, 1.0),
        ({1}, [2, 1, 3], 3, 1 / 2),
        ({1}, [2, 3, 1], 2, 0.0),
        ({1, 2}, [1, 3, 2], 3, (1 + 2 / 3) / 2),
        ({1, 2, 3}, [1], 1, 1.0),
        ({1, 2}, [1, 1, 2], 3, (1 + 2 / 3) / 2),
        (set(), [1], 3, 0.0),
        ({1}, [], 3, 0.0),
    ],
)
def test_average_precision_counts_each_hit_once(actual: set[int], predicted: list[int], k: int, score: float) -> None:
    assert metrics.average_precision_at_k(actual, predicted, k) == pytest.approx(score)
    assert metrics.mean_average_precision_at_k([actual, {9}], [predicted, [9]], k) == pytest.approx((score + 1) / 2)


def table(ids: list[int], scores: list[Any]) -> pd.DataFrame:
    return pd.DataFrame({"id": ids, "y": scores})


@pytest.mark.parametrize(
    ("ready", "truth", "guess"),
    [(utils.prepare_for_accuracy_metric, "y_true", "y_pred"), (utils.prepare_for_auroc_metric, "y_true", "y_score")],
)
def test_submissions_are_put_in_the_order_of_ids(ready: Callable[..., Any], truth: str, guess: str) -> None:
    names = {"target_column": "y", "id_column": "id"} if guess == "y_pred" else {"target_col": "y", "id_col": "id"}
    found = ready(table([2, 1, 3], [0.2, 0.1, 0.3]), table([3, 2, 1], [1, 0, 1]), **names)
    assert found[truth].tolist() == [1, 0, 1]
    assert found[guess].tolist() == [0.1, 0.2, 0.3]
    for wrong in (table([1, 2], [0.0, 0.0]), table([1, 2, 4], [0.0] * 3), table([1, 2, 3], [0.0] * 3)[["id"]]):
        with pytest.raises(InvalidSubmissionError):
            ready(wrong, table([1, 2, 3], [1, 0, 1]), **names)


@pytest.mark.parametrize("scores", [["a", "b"], [0.5, 1.5], [-0.1, 0.5]])
def test_probabilities_are_numbers_from_0_to_1(scores: list[Any]) -> None:
    with pytest.raises(InvalidSubmissionError):
        utils.prepare_for_auroc_metric(table([1, 2], scores), table([1, 2], [0, 1]), "id", "y")


def test_answers_that_lack_a_column_are_not_the_submission_s_doing() -> None:
    with pytest.raises(AssertionError):
        utils.prepare_for_accuracy_metric(table([1], [1]), table([1], [1])[["id"]], "y", "id")


def test_classes_become_columns() -> None:
    found = utils.df_to_one_hot(pd.DataFrame({"id": [7, 8], "kind": ["b", "a"]}), "id", "kind", ["a", "b"])
    assert found.to_dict("list") == {"id": [7, 8], "a": [0, 1], "b": [1, 0]}


def test_log_loss_is_taken_of_shares_in_the_order_of_ids() -> None:
    answers = pd.DataFrame({"id": [1, 2], "a": [1, 0], "b": [0, 1]})
    logits = pd.DataFrame({"b": [3.0, 0.0], "extra": [9, 9], "id": [2, 1], "a": [1.0, 2.0]})
    found = utils.one_hot_dfs_to_log_loss_inputs(logits, answers)
    assert found["y_true"].tolist() == [[1, 0], [0, 1]]
    assert found["y_pred"] == pytest.approx(
        np.exp([[2.0, 0.0], [1.0, 3.0]]) / np.exp([[2.0, 0.0], [1.0, 3.0]]).sum(1, keepdims=True)
    )
    plain = utils.one_hot_dfs_to_log_loss_inputs(answers[::-1], answers)
    assert plain["y_pred"].tolist() == plain["y_true"].tolist()
    raw = utils.one_hot_dfs_to_log_loss_inputs(logits, answers, apply_softmax=False)
    assert raw["y_pred"].tolist() == [[2.0, 0.0], [1.0, 3.0]]
    with pytest.raises(InvalidSubmissionError, match="'b'"):
        utils.one_hot_dfs_to_log_loss_inputs(logits.drop(columns="b"), answers)
    with pytest.raises(AssertionError):
        utils.one_hot_dfs_to_log_loss_inputs(logits.assign(id=[5, 6]), answers)


@pytest.mark.filterwarnings("ignore:The .float_precision. argument")  # newer pandas reads exactly without
def test_a_table_is_read_exactly_and_an_empty_file_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n0.30000000000000004\n")
    (tmp_path / "b.csv").write_text("")
    assert utils.read_csv(tmp_path / "a.csv")["x"][0] == 0.1 + 0.2
    assert utils.read_csv(tmp_path / "b.csv").empty
    assert utils.load_answers(tmp_path / "a.csv").columns.tolist() == ["x"]
    (tmp_path / "c.jsonl").write_text('{"x": 1}\n')
    assert utils.load_answers(tmp_path / "c.jsonl") == [{"x": 1}]
    with pytest.raises(ValueError, match=r"expected \.csv or \.jsonl"):
        utils.load_answers(tmp_path / "d.txt")


def test_archives_are_unpacked_and_packed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    utils.compress(tmp_path / "in", tmp_path / "inner.zip")
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        archive.write(tmp_path / "inner.zip", "inner.zip")
    (tmp_path / "out").mkdir()
    utils.extract(tmp_path / "outer.zip", tmp_path / "out", recursive=True)
    assert (tmp_path / "out" / "a.txt").read_text() == "a"
    with pytest.raises(AssertionError, match="exists already"):
        utils.compress(tmp_path / "in", tmp_path / "inner.zip")
    with pytest.raises(NotImplementedError):
        utils.extract(tmp_path / "x.rar", tmp_path)
    assert utils.is_compressed(Path("x.7z"))
    assert not utils.is_compressed(Path("x.csv"))
