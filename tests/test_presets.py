"""Presets lie under what is typed."""

from pathlib import Path

import pytest

from gradeflow import __main__ as cli
from gradeflow import params, presets
from gradeflow.errors import SettingsError

SHIPPED = Path(__file__).parents[1] / "params.yaml"


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_fits_the_schema(name: str) -> None:
    train = params.load(SHIPPED, presets.overrides(name)).train
    assert (train.environment, train.kl_coef, train.clip_range, train.clip_range_high) == ("modeling", 0.0, 0.2, 0.3)
    assert train.group_size >= 2


def test_presets_differ_as_the_originals_did() -> None:
    found = {name: params.load(SHIPPED, presets.overrides(name)).train for name in presets.PRESETS}
    assert [(one.epochs, one.eval_every, one.learning_rate) for one in found.values()] == [
        (0, 1, 1e-6),
        (2, 8, 1e-6),
        (4, 6, 5e-7),
    ]
    assert found["fast"].max_steps == 1


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(SettingsError, match="'quick'; expected one of fast, standard, advanced"):
        presets.overrides("quick")


def test_what_is_typed_counts_before_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("gradeflow.train_grpo.main", seen.append)
    words = "--preset fast --benchmark engineering --split engineering_mini --task-limit 5 --seed 7 --train.kl_coef 0.5"
    cli.run(["train_grpo", *words.split(), "--val-ratio", "0.3", "--params", str(SHIPPED)])
    (settings,) = seen
    assert (settings.train.environment, settings.train.kl_coef, settings.train.seed) == ("modeling", 0.5, 7)
    tasks = settings.train.tasks
    assert (tasks.split, tasks.limit, tasks.val_ratio) == ("engineering_mini", 5, 0.3)
