from pathlib import Path

import pytest
import torch

from gradeflow.grpo import loop
from gradeflow.params import Train
from support import tiny


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Train:
    return tiny.settings(tmp_path_factory.mktemp("base")).train


def changed(settings: Train, **values: object) -> Train:
    return settings.model_copy(update=values)


def test_the_temperature_is_constant_without_a_schedule(settings: Train) -> None:
    assert loop.temperature_at(1000, changed(settings, temperature=0.7, temperature_steps=0)) == 0.7


@pytest.mark.parametrize(("step", "expected"), [(0, 0.3), (50, 0.55), (100, 0.8), (500, 0.8)])
def test_the_temperature_follows_its_schedule(settings: Train, step: int, expected: float) -> None:
    schedule = changed(settings, temperature=0.3, temperature_end=0.8, temperature_steps=100)
    assert loop.temperature_at(step, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("micro_batch", [1, 5, 32, 64, 1000])
def test_one_update_covers_whole_groups_whatever_the_micro_batch(
    settings: Train, micro_batch: int, tmp_path: Path
) -> None:
    chosen = changed(settings, prompts_per_step=6, group_size=4, micro_batch=micro_batch)
    config = loop.configure(chosen, tmp_path)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 24
    assert config.per_device_train_batch_size <= max(micro_batch, 1)
    assert config.generation_batch_size == 24


def test_scores_pass_and_missing_ones_stay_missing() -> None:
    assert loop.reward(["a", "b"], [1.0, None]) == [1.0, None]


def test_a_fresh_adapter_changes_nothing(settings: Train, tmp_path: Path) -> None:
    from gradeflow import models

    base, _ = models.load(tiny.settings(tmp_path).base)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = base(ids).logits
        after = loop.attach_adapter(base, settings.lora)(ids).logits
    assert torch.equal(before, after)
